"""A plan as Kubernetes objects: restricted pods, stable templates, nothing that outlives its owner."""

import base64
import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_operator.api import LLMDeployment
from strata_operator.decide.view import given_the_control_key
from strata_operator.errors import InvalidInputError
from strata_operator.render import RenderOptions, epoch_objects, image_for, read_epoch, render, slot_address
from strata_operator.render.epoch import Epoch, Formation
from strata_operator.render.slots import RANK_IDLE_BYTES, SLOT_IDLE_BYTES, Slot
from strata_planner.contract.environment import SLOT_ENVIRONMENT
from strata_planner.contract.keys import gateway_secret, slot_secret
from strata_planner.question.cluster import Cluster, Device, Node
from strata_runtime.gateway.settings import read_settings
from strata_runtime.pipeline.slot import parse
from tests.operator.builders import a_deployment, a_pod
from tests.operator.fakes import a_plan, replicas_of

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
OPTIONS = RenderOptions(image="strata-runtime:1", control_key="secret", operator_namespace="strata-system")
GPU_SLOT = Slot("chat-a-tesla-t4", "gpu-a.example", Device(type="Tesla-T4", count=2, memory_bytes=15 * GIB))
CPU_SLOT = Slot("chat-b-cpu", "b", Device(type="cpu", memory_bytes=3 * GIB, threads=2))
SLOTS = (GPU_SLOT, CPU_SLOT)

# Everything that a user may set and that reaches a pod.
FULL = {
    "model": {
        "uri": "hf://owner/name",
        "tokenSecretRef": {"name": "hf", "key": "token"},
        "cache": {"persistentVolumeClaim": "models"},
    },
    "placement": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    "runtime": {
        "pod": {
            "resources": {"requests": {"memory": "9Gi", "ephemeral-storage": "1Gi"}},
            "env": [
                {"name": "HF_HOME", "value": "/other"},
                {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
            ],
            "volumes": [{"name": "extra", "emptyDir": {}}],
            "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
            "annotations": {"team": "a"},
            "priorityClassName": "high",
        }
    },
    "gateway": {
        "apiKeysSecretRef": {"name": "keys"},
        "allowedOrigins": ["https://chat.example.org", "http://localhost:3000"],
        "docs": True,
        "service": {"type": "NodePort"},
    },
}
DEPLOYMENTS = {
    "the smallest": a_deployment().build(),
    "everything set": a_deployment().with_spec(**FULL).build(),
    "a model in a claim": a_deployment().with_spec(model={"uri": "pvc://models/llama/8b"}).build(),
    "a model in a user's volume": a_deployment().with_spec(model={"uri": "file:///models/llama"}).build(),
}
everywhere = pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def pods(deployment: LLMDeployment) -> Iterator[dict[str, Any]]:
    for each in render(deployment, SLOTS, OPTIONS):
        if each["kind"] in {"StatefulSet", "Deployment"}:
            yield each["spec"]["template"]["spec"]


def slot_pod(deployment: LLMDeployment, slot: Slot = GPU_SLOT) -> dict[str, Any]:
    (statefulset,) = of_kind(render(deployment, (slot,), OPTIONS), "StatefulSet")
    return dict(statefulset["spec"]["template"]["spec"])


def gateway_pod(deployment: LLMDeployment) -> dict[str, Any]:
    (made,) = of_kind(render(deployment, SLOTS, OPTIONS), "Deployment")
    return dict(made["spec"]["template"]["spec"])


# The controls of the restricted profile (kubernetes.io/docs/concepts/security/pod-security-standards) that our pods touch.
RESTRICTED = {
    "no privilege escalation": lambda pod, box: box["securityContext"]["allowPrivilegeEscalation"] is False,
    "not privileged": lambda pod, box: not box["securityContext"].get("privileged"),
    "not root": lambda pod, box: (
        pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    ),
    "seccomp": lambda pod, box: pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"},
    "no capability": lambda pod, box: box["securityContext"]["capabilities"] == {"drop": ["ALL"]},
    "no host namespaces": lambda pod, box: not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"},
    "no host ports": lambda pod, box: all("hostPort" not in port for port in box["ports"]),
    "volumes": lambda pod, box: all(
        volume.keys() & {"configMap", "emptyDir", "secret", "persistentVolumeClaim"} for volume in pod["volumes"]
    ),
    "read-only root": lambda pod, box: box["securityContext"]["readOnlyRootFilesystem"] is True,
    "no account token": lambda pod, box: pod["automountServiceAccountToken"] is False,
}


@everywhere
@pytest.mark.parametrize("control", RESTRICTED)
def test_pods_keep_the_restricted_profile(deployment: LLMDeployment, control: str) -> None:
    for pod in pods(deployment):
        (box,) = pod["containers"]
        assert RESTRICTED[control](pod, box)


@everywhere
def test_objects_are_owned_and_have_no_finalizers(deployment: LLMDeployment) -> None:
    epoch = Epoch(3, "key", a_plan("chat-b-cpu"))
    for each in [*render(deployment, SLOTS, OPTIONS), *epoch_objects(deployment, epoch, Cluster(nodes=()))]:
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["kind"], owner["controller"]) == (deployment.metadata.uid, "LLMDeployment", True)
        assert "finalizers" not in each["metadata"]
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "chat"


@everywhere
def test_mounts_have_volumes_and_names_are_unique(deployment: LLMDeployment) -> None:
    for pod in pods(deployment):
        volumes = [volume["name"] for volume in pod["volumes"]]
        environment = [each["name"] for each in pod["containers"][0]["env"]]
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)
        assert len(set(volumes)) == len(volumes)
        assert len(set(environment)) == len(environment)


@everywhere
def test_selectors_find_the_pods_of_their_kind(deployment: LLMDeployment) -> None:
    objects = render(deployment, SLOTS, OPTIONS)
    found = [each["spec"]["template"]["metadata"]["labels"] for each in objects if "template" in each.get("spec", {})]
    for each in objects:
        selector = selector_of(each)
        if selector is not None:
            assert any(selector.items() <= labels.items() for labels in found), each["metadata"]["name"]


def selector_of(each: dict[str, Any]) -> dict[str, str] | None:
    if each["kind"] == "Service":
        return dict(each["spec"]["selector"])
    chosen = each.get("spec", {}).get("selector") or each.get("spec", {}).get("podSelector")
    return None if chosen is None else dict(chosen["matchLabels"])


def test_a_slot_is_bound_to_its_node_and_holds_its_gpus() -> None:
    pod = slot_pod(a_deployment().build())
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["gpu-a.example"]}]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "2"}
    assert resources["requests"] == {"nvidia.com/gpu": "2", "cpu": "1", "memory": "2Gi"}


def test_what_lies_in_host_memory_is_asked_for_by_a_gpu_slot_and_on_processors_is_part_of_the_plan() -> None:
    shadows = {"replanning": {"takeover": {"shadow": {"maxMemory": "16Gi"}}}}
    log = {"runtime": {"boundaryLog": {"maxMemory": "4Gi"}}}
    for wish, expected in ((shadows, 18), (log, 6), ({**shadows, **log}, 22)):
        with_them = a_deployment().with_spec(**wish).build()
        asked = slot_pod(with_them)["containers"][0]["resources"]["requests"]["memory"]
        assert asked == str(expected * GIB)
        assert slot_pod(with_them, CPU_SLOT) == slot_pod(a_deployment().build(), CPU_SLOT)
    own = {"pod": {"resources": {"requests": {"memory": "64Gi"}}}, **log["runtime"]}
    pod = slot_pod(a_deployment().with_spec(replanning=shadows["replanning"], runtime=own).build())
    assert pod["containers"][0]["resources"]["requests"]["memory"] == "64Gi"


def test_a_slot_on_processors_asks_for_its_device_and_its_process() -> None:
    pod = slot_pod(a_deployment().with_spec(**FULL).build(), CPU_SLOT)
    memory = str(3 * GIB + SLOT_IDLE_BYTES)
    resources = pod["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": "2", "memory": memory, "ephemeral-storage": "1Gi"}
    assert resources["limits"] == {"memory": memory}
    assert pod["containers"][0]["command"][-2:] == ["--threads", "2"]


def test_a_slot_on_several_devices_asks_for_all_of_them_and_computes_with_the_threads_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = dataclasses.replace(CPU_SLOT, device=Device(type="cpu", count=3, memory_bytes=3 * GIB, threads=2))
    (box,) = slot_pod(a_deployment().build(), group)["containers"]
    memory = str(9 * GIB + SLOT_IDLE_BYTES + 2 * RANK_IDLE_BYTES)
    assert box["resources"] == {"requests": {"cpu": "6", "memory": memory}, "limits": {"memory": memory}}
    monkeypatch.setenv("STRATA_CONTROL_KEY", "secret")
    options = parse(box["command"][3:])
    assert (options.threads, options.ranks) == (2, 3)


def test_a_slot_of_several_gpus_starts_ranks_and_has_memory_for_them_to_meet_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod = slot_pod(a_deployment().build())
    (box,) = pod["containers"]
    assert box["resources"]["limits"]["nvidia.com/gpu"] == "2"
    monkeypatch.setenv("STRATA_CONTROL_KEY", "secret")
    assert parse(box["command"][3:]).ranks == 2
    [mount] = [each for each in box["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    [volume] = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["emptyDir"] == {"medium": "Memory"}
    own = {
        "pod": {
            "volumes": [{"name": "shm", "emptyDir": {}}],
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
    }
    theirs = slot_pod(a_deployment().with_spec(runtime=own).build())["containers"][0]["volumeMounts"]
    assert [each["name"] for each in theirs if each["mountPath"] == "/dev/shm"] == ["shm"]
    one = dataclasses.replace(GPU_SLOT, device=Device(type="Tesla-T4", count=1, memory_bytes=15 * GIB))
    (alone,) = slot_pod(a_deployment().build(), one)["containers"]
    assert all(each["mountPath"] != "/dev/shm" for each in alone["volumeMounts"])


def test_slots_stay_on_lost_nodes_and_the_gateway_leaves_them() -> None:
    deployment = a_deployment().with_spec(**FULL).build()
    away = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    for pod, seconds in ((slot_pod(deployment), None), (gateway_pod(deployment), 5)):
        own, *rest = pod["tolerations"]
        assert own == {"key": "nvidia.com/gpu", "operator": "Exists"}
        assert {each["key"] for each in rest} == away
        assert {(each["effect"], each["operator"], each.get("tolerationSeconds")) for each in rest} == {
            ("NoExecute", "Exists", seconds)
        }


def test_a_slot_is_never_restarted_by_applying() -> None:
    (statefulset,) = of_kind(render(a_deployment().build(), (GPU_SLOT,), OPTIONS), "StatefulSet")
    assert statefulset["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert statefulset["spec"]["replicas"] == 1


def test_every_pod_reads_the_key_of_its_own_control_port_alone() -> None:
    rendered = render(a_deployment().build(), SLOTS, OPTIONS)
    keys = {each["metadata"]["name"]: each["stringData"]["key"] for each in of_kind(rendered, "Secret")}
    assert keys.pop("chat-control") == OPTIONS.control_key
    expected = {f"{slot.name}-key": slot_secret(OPTIONS.control_key, slot.name) for slot in SLOTS}
    assert keys == expected | {"chat-gateway-key": gateway_secret(OPTIONS.control_key)}
    read = {}
    for each in (*of_kind(rendered, "StatefulSet"), *of_kind(rendered, "Deployment")):
        (box,) = each["spec"]["template"]["spec"]["containers"]
        read[each["metadata"]["name"]] = [one["valueFrom"] for one in box["env"] if "valueFrom" in one]
    assert read == {
        name: [{"secretKeyRef": {"name": f"{name}-key", "key": "key"}}]
        for name in (*(slot.name for slot in SLOTS), "chat-gateway")
    }


def test_a_pod_that_0_1_0_made_is_known_by_the_secret_it_reads() -> None:
    deployment = a_deployment().build()
    pods_now = [a_pod().of_slot(deployment, slot.name).build() for slot in SLOTS]
    for pod, spec in zip(pods_now, pods(deployment), strict=False):
        pod["spec"] = copy.deepcopy(spec)
    assert given_the_control_key(deployment, pods_now) == set()
    pods_now[1]["spec"]["containers"][0]["env"] = [
        {"name": "STRATA_CONTROL_KEY", "valueFrom": {"secretKeyRef": {"name": "chat-control", "key": "key"}}}
    ]
    assert given_the_control_key(deployment, pods_now) == {SLOTS[1].name}


def test_the_users_overlay_reaches_slots_and_gateway() -> None:
    deployment = a_deployment().with_spec(**FULL).build()
    for pod in pods(deployment):
        environment = {each["name"]: each for each in pod["containers"][0]["env"]}
        assert environment["HF_HOME"] == {"name": "HF_HOME", "value": "/other"}
        assert environment["A"] == {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}
        assert environment["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
        assert {"name": "extra", "mountPath": "/extra"} in pod["containers"][0]["volumeMounts"]
        assert pod["priorityClassName"] == "high"
    for each in of_kind(render(deployment, SLOTS, OPTIONS), "StatefulSet"):
        assert each["spec"]["template"]["metadata"]["annotations"]["team"] == "a"


def test_slots_start_with_the_environment_that_memory_is_predicted_for_unless_the_user_says_otherwise() -> None:
    own = {"name": "MKL_DISABLE_FAST_MM", "value": "0"}
    changed = a_deployment().with_spec(runtime={"pod": {"env": [own]}}).build()
    for deployment, expected in (
        (a_deployment().build(), SLOT_ENVIRONMENT),
        (changed, {**SLOT_ENVIRONMENT, "MKL_DISABLE_FAST_MM": "0"}),
        (
            a_deployment().with_spec(runtime={"stepTimeoutSeconds": 0}).build(),
            {**SLOT_ENVIRONMENT, "STRATA_STEP_TIMEOUT_SECONDS": "0"},
        ),
    ):
        for each in of_kind(render(deployment, SLOTS, OPTIONS), "StatefulSet"):
            (box,) = each["spec"]["template"]["spec"]["containers"]
            assert expected.items() <= {one["name"]: one.get("value") for one in box["env"]}.items()


MODELS = {
    "pvc://models/llama/8b": ({"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, "/models/models"),
    "hf://owner/name": ({"emptyDir": {}}, "/cache"),
}


@pytest.mark.parametrize("uri", MODELS)
def test_the_model_is_mounted(uri: str) -> None:
    source, path = MODELS[uri]
    for pod in pods(a_deployment().with_spec(model={"uri": uri}).build()):
        (volume,) = [each for each in pod["volumes"] if each["name"] not in {"strata-scratch", "strata-shared-memory"}]
        (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume["name"]]
        assert source.items() <= volume.items()
        assert mount["mountPath"] == path
        assert mount.get("readOnly", False) == ("persistentVolumeClaim" in source)


@pytest.mark.parametrize(
    ("model", "draft", "claims"),
    [
        ("pvc://models/8b", "pvc://models/1b", {"/models/models": "models"}),
        ("pvc://models/8b", "pvc://small/1b", {"/models/models": "models", "/models/small": "small"}),
        ("pvc://models/8b", "hf://owner/small", {"/models/models": "models", "/cache": None}),
        ("hf://owner/large", "pvc://small/1b", {"/models/small": "small", "/cache": None}),
        ("hf://owner/large", "hf://owner/small", {"/cache": None}),
    ],
)
def test_the_draft_model_is_mounted_beside_the_model(model: str, draft: str, claims: dict[str, str | None]) -> None:
    """Each claim once; what is downloaded lies in one cache."""
    speculation = {"mode": "draft", "draftModel": {"uri": draft}}
    for pod in pods(a_deployment().with_spec(model={"uri": model}, runtime={"speculation": speculation}).build()):
        volumes = {each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in pod["containers"][0]["volumeMounts"]}
        mounts.pop("/dev/shm", None)
        assert mounts == claims | {"/tmp": None}
        named = {each["name"] for each in pod["containers"][0]["env"]}
        assert ("HF_HOME" in named) == ("/cache" in claims)


@everywhere
def test_what_slots_keep_lies_in_a_volume_that_can_be_written(deployment: LLMDeployment) -> None:
    """Where the model is downloaded to, so that a claim for downloads keeps it too; else in the pod's own scratch."""
    for pod in pods(deployment):
        (box,) = pod["containers"]
        environment = {each["name"]: each.get("value") for each in box["env"]}
        hub = deployment.spec.model.uri.startswith("hf://")
        assert (environment.get("XDG_CACHE_HOME") == "/cache") == hub
        folder = environment.get("XDG_CACHE_HOME") or environment["HOME"]
        (mount,) = [each for each in box["volumeMounts"] if each["mountPath"] == folder]
        assert not mount.get("readOnly", False)


def test_the_gateway_takes_the_commit_that_was_planned() -> None:
    deployment = a_deployment().build()
    pinned = dataclasses.replace(OPTIONS, model_uri="hf://owner/name@0123abc")
    for options, uri in ((OPTIONS, "hf://owner/name"), (pinned, "hf://owner/name@0123abc")):
        (made,) = of_kind(render(deployment, SLOTS, options), "Deployment")
        command = made["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[command.index("--model-uri") + 1] == uri


def test_the_gateway_is_told_where_the_keys_are() -> None:
    (box,) = gateway_pod(a_deployment().with_spec(**FULL).build())["containers"]
    command = " ".join(box["command"])
    assert "--served-model-name chat --api-keys-file /etc/strata/api-keys/keys" in command
    assert {"name": "strata-api-keys", "mountPath": "/etc/strata/api-keys", "readOnly": True} in box["volumeMounts"]
    assert "--api-keys-file" not in gateway_pod(a_deployment().build())["containers"][0]["command"]


def test_the_gateway_is_told_which_pages_may_ask() -> None:
    (box,) = gateway_pod(a_deployment().with_spec(**FULL).build())["containers"]
    flags = ["--allowed-origins", "https://chat.example.org,http://localhost:3000", "--docs"]
    at = box["command"].index(flags[0])
    assert box["command"][at : at + 3] == flags
    assert read_settings(box["command"][3:], {"STRATA_CONTROL_KEY": "x"}).pages.docs, "the gateway knows these flags"
    assert not {*flags[::2]} & {*gateway_pod(a_deployment().build())["containers"][0]["command"]}


@everywhere
@pytest.mark.parametrize("lets_go", [False, True])
def test_a_drain_waits_for_slots_to_leave_unless_no_plan_does_without_them(
    deployment: LLMDeployment, *, lets_go: bool
) -> None:
    options = dataclasses.replace(OPTIONS, lets_go=lets_go)
    budgets = of_kind(render(deployment, SLOTS, options), "PodDisruptionBudget")
    chosen = [each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] for each in budgets]
    assert chosen == ["slot", "gateway"]
    assert [each["spec"]["maxUnavailable"] for each in budgets] == [int(lets_go), 1]
    assert {each["spec"]["unhealthyPodEvictionPolicy"] for each in budgets} == {"AlwaysAllow"}


@pytest.mark.parametrize("replicas", [1, 3])
def test_gateways_are_as_many_as_asked_for_and_apart_from_each_other(replicas: int) -> None:
    deployment = a_deployment().with_spec(gateway={"replicas": replicas}).build()
    (made,) = of_kind(render(deployment, SLOTS, OPTIONS), "Deployment")
    assert made["spec"]["replicas"] == replicas
    # Never more at once, for which there may be no room, and never all of several away.
    assert made["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    spread = made["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname"] * (replicas > 1)
    (box,) = made["spec"]["template"]["spec"]["containers"]
    told = read_settings(box["command"][3:], {"STRATA_CONTROL_KEY": "x"})
    if replicas == 1:
        assert (told.journal_port, told.peers) == (None, ())
    else:
        (peer,) = told.peers
        (service,) = [
            each
            for each in of_kind(render(deployment, SLOTS, OPTIONS), "Service")
            if f"{each['metadata']['name']}.default.svc" == peer.host
        ]
        assert service["spec"]["clusterIP"] == "None", "the name of each of them"
        assert told.journal_port == peer.port
        assert peer.port in [port["port"] for port in service["spec"]["ports"]]
        assert peer.port in [port["containerPort"] for port in box["ports"]]
    for each in spread:
        assert each["labelSelector"]["matchLabels"].items() <= made["spec"]["template"]["metadata"]["labels"].items()


def test_a_slot_listens_where_its_address_says() -> None:
    deployment = a_deployment().in_namespace("llm").build()
    address = slot_address(deployment, GPU_SLOT.name)
    assert address.host == "chat-a-tesla-t4-0.chat-slots.llm.svc"
    (statefulset,) = of_kind(render(deployment, (GPU_SLOT,), OPTIONS), "StatefulSet")
    assert f"{statefulset['metadata']['name']}-0.{statefulset['spec']['serviceName']}.llm.svc" == address.host
    ports = {
        each["name"]: each["containerPort"]
        for each in statefulset["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert ports == {"control": address.control_port, "data": address.data_port, "requests": address.request_port}


def cluster_of(plan: Any) -> Cluster:
    """A cluster that a plan may have been made for."""
    nodes: dict[str, dict[str, Device]] = {}
    for stage in plan.replicas[0].stages:
        for ref in stage.devices:
            nodes.setdefault(stage.node, {})[ref.type] = Device(type=ref.type, memory_bytes=GIB, threads=1)
    return Cluster(nodes=tuple(Node(name, tuple(devices.values())) for name, devices in nodes.items()))


def test_an_epoch_is_immutable_and_reads_back() -> None:
    deployment, plan = a_deployment().build(), a_plan("chat-b-cpu")
    secret, config_map = epoch_objects(deployment, Epoch(7, "epoch-secret", plan), cluster_of(plan))
    assert secret["metadata"]["name"] == config_map["metadata"]["name"] == "chat-epoch-7"
    assert secret["immutable"] is config_map["immutable"] is True
    assert "epoch-secret" not in json.dumps(config_map)
    stored = secret | {
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in secret["stringData"].items()}
    }
    assert read_epoch(stored, config_map) == (Epoch(7, "epoch-secret", plan), cluster_of(plan))


def test_an_epoch_keeps_the_keys_of_replicas_that_go_on() -> None:
    """Whatever becomes of the records of the epochs that formed them."""
    plan = replicas_of(a_plan("chat-a-cpu"), a_plan("chat-b-cpu"), a_plan("chat-c-cpu"))
    epoch = Epoch(7, "epoch-secret", plan, (Formation(0, 3, "third"), Formation(2, 5, "fifth")))
    secret, config_map = epoch_objects(a_deployment().build(), epoch, cluster_of(plan))
    data = {name: base64.b64encode(text.encode()).decode() for name, text in secret["stringData"].items()}
    assert read_epoch({"data": data}, config_map)[0] == epoch
    assert [epoch.formed_in(replica) for replica in range(3)] == [3, 7, 5]
    assert not any(key in json.dumps(config_map) for key in ("epoch-secret", "third", "fifth"))


IMAGES = {
    "the user's": ({"runtime": {"image": "mine"}}, {"image": "recorded"}, "mine"),
    "the recorded one": ({}, {"image": "recorded"}, "recorded"),
    "the operator's": ({}, {}, "default"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_upgrading_the_operator_changes_no_recorded_image(name: str) -> None:
    spec, status, expected = IMAGES[name]
    assert image_for(a_deployment().with_spec(**spec).with_status(**status).build(), "default") == expected


def test_without_any_image_the_user_is_asked_for_one() -> None:
    with pytest.raises(InvalidInputError, match=r"spec\.runtime\.image: is required"):
        image_for(a_deployment().build(), "")
