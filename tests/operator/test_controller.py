"""The controller against a pretended API server: what it writes, in which order, and that nothing it writes has a finalizer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_operator.act.controller import Controller, ControllerOptions
from tests.operator.fake_api import FakeApi, serving
from tests.operator.test_cli import CONFIG
from tests.operator.test_kube import kube_of

LLMDS = "/apis/strata.dev/v1alpha1/namespaces/ns/llmdeployments"
OPTIONS = ControllerOptions(namespaces=(), runtime_image="strata-runtime:1", operator_namespace="strata")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def api(model: Path) -> Iterator[FakeApi]:
    """Two nodes that are CPU devices, one deployment of a small model."""
    fake = FakeApi()
    for name in ("a", "b"):
        fake.put(f"/api/v1/nodes/{name}", a_node(name))
    fake.put(f"{LLMDS}/chat", a_deployment("chat", model))
    with serving(fake) as url:
        fake.url = url
        yield fake


def a_node(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"strata.dev/device": "cpu"}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "2", "memory": "3Gi"},
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        },
    }


def a_deployment(name: str, model: Path, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "strata.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "generation": 1},
        "spec": {
            "model": {"uri": f"file://{model}", "maxModelLen": 128},
            "workload": {"promptTokens": 32, "outputTokens": 32, "concurrency": 2},
            **spec,
        },
    }


async def looked(api: FakeApi, times: int) -> None:
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True)
    for _ in range(times):
        await controller.look()
    for kept in controller._kept.values():
        await kept.links.close()


async def test_a_new_deployment_is_planned_then_rendered(api: FakeApi) -> None:
    await looked(api, 2)
    epoch = api.objects["/api/v1/namespaces/ns/configmaps/chat-epoch-1"]
    assert epoch["immutable"] is True
    assert epoch["metadata"]["annotations"]["strata.dev/reason"] == "Created"
    kinds = {thing["kind"] for thing in api.objects.values() if thing.get("kind")}
    assert kinds >= {"StatefulSet", "Deployment", "Service", "Secret", "NetworkPolicy", "PodDisruptionBudget"}
    status = api.objects[f"{LLMDS}/chat"]["status"]
    assert (status["phase"], status["image"]) == ("Loading", "strata-runtime:1")
    assert {condition["type"] for condition in status["conditions"]} >= {"Inventoried", "Planned", "Ready"}
    assert [request.body["reason"] for request in api.wrote("POST", "/events")] == ["Created"]


async def test_everything_is_applied_and_nothing_has_a_finalizer(api: FakeApi) -> None:
    await looked(api, 2)
    patches = api.wrote("PATCH", "/")
    assert {request.content_type for request in patches} == {"application/apply-patch+yaml"}
    assert {tuple(request.query["fieldManager"]) for request in patches} == {("strata-operator",)}
    assert not [thing for thing in api.objects.values() if "finalizers" in thing["metadata"]]
    owned = [thing for path, thing in api.objects.items() if "/ns/" in path and "ownerReferences" in thing["metadata"]]
    assert {owner["uid"] for thing in owned for owner in thing["metadata"]["ownerReferences"]} == {"uid-chat"}


async def test_a_change_that_is_taken_back_is_applied_too(api: FakeApi) -> None:
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True)
    deployment = api.objects[f"{LLMDS}/chat"]
    notes = []
    for annotations in ({}, {"example.org/note": "1"}, {}):
        deployment["spec"]["runtime"] = {"pod": {"annotations": annotations}}
        await controller.look()
        await controller.look()
        gateway = api.objects["/apis/apps/v1/namespaces/ns/deployments/chat-gateway"]
        notes.append(gateway["spec"]["template"]["metadata"]["annotations"])
    assert notes == [{}, {"example.org/note": "1"}, {}]
    for kept in controller._kept.values():
        await kept.links.close()


async def test_another_operator_goes_on_where_the_first_stopped(api: FakeApi) -> None:
    await looked(api, 2)
    keys = api.objects["/api/v1/namespaces/ns/secrets/chat-control"]["data"]
    before = len(api.wrote("POST", "/configmaps"))
    await looked(api, 2)
    assert api.objects["/api/v1/namespaces/ns/secrets/chat-control"]["data"] == keys
    assert len(api.wrote("POST", "/configmaps")) == before


async def test_two_deployments_never_get_the_same_device(api: FakeApi, model: Path) -> None:
    api.put(f"{LLMDS}/other", a_deployment("other", model))
    await looked(api, 2)
    nodes = {
        name: {stage["node"] for stage in api.objects[f"{LLMDS}/{name}"]["status"]["stages"]}
        for name in ("chat", "other")
    }
    assert nodes["chat"]
    assert nodes["other"]
    assert not nodes["chat"] & nodes["other"]


async def test_what_does_not_fit_is_said_in_status_and_by_an_event(api: FakeApi, model: Path) -> None:
    api.put(f"{LLMDS}/chat", a_deployment("chat", model, placement={"minStages": 3}))
    await looked(api, 2)
    status = api.objects[f"{LLMDS}/chat"]["status"]
    planned = next(condition for condition in status["conditions"] if condition["type"] == "Planned")
    assert (status["phase"], planned["reason"]) == ("Failed", "Infeasible")
    assert planned["message"]
    assert not api.wrote("POST", "/configmaps")
    assert "Infeasible" in [request.body["reason"] for request in api.wrote("POST", "/events")]


async def test_a_claim_of_one_node_is_refused_for_slots_on_two(api: FakeApi, model: Path) -> None:
    claim = {"metadata": {"name": "cache", "namespace": "ns"}, "status": {"accessModes": ["ReadWriteOnce"]}}
    api.put("/api/v1/namespaces/ns/persistentvolumeclaims/cache", claim)
    volumes = [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}]
    spread = {"placement": {"minStages": 2}, "runtime": {"pod": {"volumes": volumes}}}
    api.put(f"{LLMDS}/chat", a_deployment("chat", model, **spread))
    await looked(api, 2)
    planned = next(c for c in api.objects[f"{LLMDS}/chat"]["status"]["conditions"] if c["type"] == "Planned")
    assert (planned["status"], planned["reason"]) == ("False", "ClaimNotShared")
    assert "the claim cache is ReadWriteOnce" in planned["message"]
    assert not api.wrote("POST", "/configmaps")


async def test_a_model_that_is_not_there_is_invalid_input(api: FakeApi) -> None:
    api.put(f"{LLMDS}/chat", a_deployment("chat", Path("/nowhere")))
    await looked(api, 2)
    (planned,) = [c for c in api.objects[f"{LLMDS}/chat"]["status"]["conditions"] if c["type"] == "Planned"]
    assert planned["reason"] == "InvalidInput"
    assert "there is no folder /nowhere" in planned["message"]


async def test_a_deployment_that_is_deleted_is_forgotten(api: FakeApi) -> None:
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True)
    await controller.look()
    del api.objects[f"{LLMDS}/chat"]
    await controller.look()
    assert not controller._kept


async def test_only_the_leader_acts(api: FakeApi) -> None:
    leads = False
    controller = Controller(kube_of(api.url), OPTIONS, lambda: leads)
    running = asyncio.create_task(controller.run())
    controller.wake()
    await asyncio.sleep(0)
    assert not api.requests
    leads = True
    controller.wake()
    while not api.wrote("POST", "/configmaps"):  # noqa: ASYNC110  the other side is a thread
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("pod", "ended"),
    [
        pytest.param({}, True, id="deployment-and-node-are-gone"),
        pytest.param({"node": "a"}, False, id="its-node-will-end-it"),
        pytest.param({"instance": "chat"}, False, id="its-deployment-is-there"),
        pytest.param({"deleted": None}, False, id="nobody-wants-it-gone"),
        pytest.param({"manager": "Helm"}, False, id="not-ours"),
    ],
)
async def test_only_stranded_pods_are_ended(api: FakeApi, pod: dict[str, Any], ended: bool) -> None:  # noqa: FBT001
    wish = {"node": "lost", "instance": "gone", "deleted": "2026-01-01T00:00:00Z", "manager": "strata", **pod}
    path = "/api/v1/namespaces/ns/pods/x-0"
    labels = {"app.kubernetes.io/managed-by": wish["manager"], "app.kubernetes.io/instance": wish["instance"]}
    metadata = {"name": "x-0", "namespace": "ns", "labels": labels}
    deletion = {"deletionTimestamp": wish["deleted"]} if wish["deleted"] else {}
    api.put(path, {"metadata": {**metadata, **deletion}, "spec": {"nodeName": wish["node"]}})
    await looked(api, 1)
    assert (path not in api.objects) == ended
