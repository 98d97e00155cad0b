"""What one finds once an object is applied to three unlike nodes: pods, events, owners, and tokens as of transformers. The chart is upgraded beside it."""

import openai
import pytest

from tests.cluster.deployed import Deployed, stream
from tests.cluster.deployment.life import LONG, PROMPT, QUESTION, WORKERS, Transformers, streamed_through
from tests.cluster.operator_release import OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_an_applied_object_ends_ready_on_three_unlike_nodes(chat: Deployed, cluster: Cluster) -> None:
    status = chat.get()["status"]
    assert (status["phase"], status["stagesReady"], status["committedEpoch"]) == ("Ready", "3/3", 1)
    assert {stage["node"] for stage in status["stages"]} == WORKERS
    spans = [range(stage["layers"][0], stage["layers"][1] + 1) for stage in status["stages"]]
    assert [layer for span in spans for layer in span] == list(range(12))
    assert all(stage["bits"] == {"16": stage["layers"][1] - stage["layers"][0] + 1} for stage in status["stages"])
    assert all(stage["memoryMeasuredBytes"] for stage in status["stages"])
    slots = chat.pods("slot")
    assert {pod["spec"]["nodeName"] for pod in slots.values()} == WORKERS
    threads = {
        pod["spec"]["nodeName"]: pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] for pod in slots.values()
    }
    assert threads == {"node-a": "2", "node-b": "1", "node-c": "1"}


def test_kubectl_shows_what_a_person_asks_for(chat: Deployed, cluster: Cluster) -> None:
    where = f"--namespace={chat.namespace}"
    header, row = (
        line.split("  ") for line in cluster.kubectl("get", "llmd", "chat", "-o", "wide", where).splitlines()
    )
    names, values = ([cell.strip() for cell in cells if cell.strip()] for cells in (header, row))
    shown = dict(zip(names, values, strict=True))
    predicted = chat.get()["status"]["plan"]["predicted"]["tokensPerSecond"]
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "chat",
        "MODEL": "file:///models/strata-tiny",
        "PHASE": "Ready",
        "READY": "True",
        "STAGES": "3/3",
        "GPUS": "3 x cpu",
        "TOKENS/S": f"{predicted:g}",
        "URL": f"http://chat-gateway.{chat.namespace}:8000",
        "GATEWAYS": "1/1",
    }
    told = {event["reason"]: event["message"] for event in chat.events()}
    assert "layers 0-" in told["Created"]
    assert told["Serving"].startswith("Ready: epoch 1 serves at http://chat-gateway")
    assert not [event for event in chat.events() if event["type"] == "Warning"]


def test_the_openai_client_gets_the_tokens_of_transformers(
    chat: Deployed, expected: str, reference: Transformers
) -> None:
    with chat.client() as client:
        assert [model.id for model in client.models.list()] == ["chat"]
        whole = client.completions.create(
            model="chat", prompt=PROMPT, max_tokens=LONG, temperature=0, extra_body={"ignore_eos": True}
        )
        assert whole.choices[0].text == expected
        assert whole.usage
        assert whole.usage.completion_tokens == LONG
        assert "".join(stream(client, "chat", PROMPT, LONG)) == expected
        said = client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": QUESTION}], max_tokens=LONG, temperature=0
        )
        assert said.choices[0].message.content == reference.answer(QUESTION)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt=PROMPT)


def test_nothing_carries_a_finalizer_and_everything_has_an_owner(chat: Deployed) -> None:
    objects = chat.objects()
    assert not [thing["metadata"]["name"] for thing in objects if thing["metadata"].get("finalizers")]
    unowned = [thing["kind"] for thing in objects if not thing["metadata"].get("ownerReferences")]
    assert unowned == ["LLMDeployment"]
    kinds = {thing["kind"] for thing in objects}
    assert kinds >= {
        "StatefulSet",
        "Deployment",
        "Service",
        "ConfigMap",
        "Secret",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }


def test_pods_without_the_tests_mounts_keep_the_restricted_profile(
    chat: Deployed, cluster: Cluster, namespace: str
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    for number, thing in enumerate(chat.objects("statefulsets,deployments")):
        spec = thing["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        mounted = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
        assert mounted
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] not in mounted]
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] not in mounted]
        del spec["serviceAccountName"], spec["serviceAccount"]  # of the other namespace
        pod = {"name": f"dry-{number}", "namespace": namespace}
        cluster.dry_run({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": spec})


def test_the_operators_role_allows_all_that_it_asks(chat: Deployed, operator: OperatorRelease) -> None:
    assert chat.get()["status"]["phase"] == "Ready"
    said = operator.logs(lines=1000)
    assert "leads" in said
    assert "forbidden" not in said.lower()


def test_upgrading_the_chart_restarts_no_slot(chat: Deployed, operator: OperatorRelease, expected: str) -> None:
    before, events = _uids(chat), len(chat.events())
    steps = Steps("helm upgrade")
    other_image = {"repository": "strata.test/another", "tag": "2"}
    text = streamed_through(
        chat, lambda: operator.upgrade(runtimeImage=other_image, logLevel="DEBUG", podAnnotations={"a": "b"}), steps
    )
    assert text == expected
    operator.wait_looked()
    assert _uids(chat) == before
    assert chat.get()["status"]["image"] != "strata.test/another:2"
    operator.rollback()
    steps.mark("rolled back")
    operator.wait_looked()
    assert _uids(chat) == before
    assert (chat.get()["status"]["phase"], chat.get()["status"]["committedEpoch"]) == ("Ready", 1)
    assert [event["message"] for event in chat.events()[events:]] == []


def _uids(chat: Deployed) -> dict[str, str]:
    pods = {**chat.pods("slot"), **chat.pods("gateway")}
    return {name: pod["metadata"]["uid"] for name, pod in pods.items()}
