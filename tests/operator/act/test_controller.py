"""The controller against a pretended API server: what it writes, in which order, and that nothing it writes has a finalizer."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from strata_operator.act.clock import Clock
from strata_operator.act.controller import UNSERVED_SECONDS, Controller, ControllerOptions
from strata_operator.act.ownership import ForeignObjectError, apply_own
from strata_operator.act.planner_call import Answer, Question, answer_to
from strata_operator.api import deployment_from_object
from strata_operator.api.tenants import TenantRules
from strata_operator.decide.actions import DeleteStatefulSet
from strata_operator.observe.source import Lists
from strata_operator.render.names import labels
from strata_operator.render.objects import metadata
from tests.operator.fake_api import FakeApi, serving
from tests.operator.observe.test_kube import kube_of

LLMDS = "/apis/strata.dev/v1alpha1/namespaces/ns/llmdeployments"
OPTIONS = ControllerOptions(namespaces=(), runtime_image="strata-runtime:1", operator_namespace="strata")


@pytest.fixture
def api(model: Path) -> Iterator[FakeApi]:
    """Two nodes that are CPU devices, one deployment of a small model."""
    fake = FakeApi()
    for name in ("a", "b"):
        fake.put(f"/api/v1/nodes/{name}", a_node(name))
    fake.put(f"{LLMDS}/chat", a_deployment("chat", model))
    with serving(fake):
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
            "planning": {"solver": "pipeline"},  # the quickest: what is planned is not what is looked at
            **spec,
        },
    }


class InThread:
    """Plans in this process: what a process of its own adds has its own tests."""

    async def answer(self, question: Question) -> Answer:
        return await asyncio.to_thread(answer_to, question)

    def warm(self) -> None: ...

    async def close(self) -> None: ...


def a_controller(api: FakeApi) -> Controller:
    return Controller(kube_of(api.url), OPTIONS, lambda: True, InThread())


async def look_and_plan(controller: Controller) -> None:
    """One look, and one that takes the plans that it asked for."""
    await controller.look()
    orders = [order.task for order in controller._planners._orders.values() if order.task]
    if orders:
        await asyncio.wait(orders)
        await controller.look()


async def looked(api: FakeApi, times: int) -> None:
    controller = a_controller(api)
    for _ in range(times):
        await look_and_plan(controller)
    await controller.close()


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
    controller = a_controller(api)
    deployment = api.objects[f"{LLMDS}/chat"]
    notes = []
    for annotations in ({}, {"example.org/note": "1"}, {}):
        deployment["spec"]["runtime"] = {"pod": {"annotations": annotations}}
        await look_and_plan(controller)
        await controller.look()
        gateway = api.objects["/apis/apps/v1/namespaces/ns/deployments/chat-gateway"]
        notes.append(gateway["spec"]["template"]["metadata"]["annotations"])
    assert notes == [{}, {"example.org/note": "1"}, {}]
    await controller.close()


async def test_a_deployment_that_waits_is_looked_at_more_and_more_seldom_until_something_of_it_changes(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, served = [0.0], list[float]()
    serve = Controller._serve

    async def counted(self: Controller, *rest: Any) -> None:
        served.append(now[0])
        await serve(self, *rest)

    monkeypatch.setattr(Controller, "_serve", counted)
    clock = Clock(seconds=lambda: now[0])
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, InThread(), clock=clock)
    for _ in range(3):
        await look_and_plan(controller)
    while now[0] < 60:
        now[0] += 1.0
        await controller.look()
    pauses = [after - before for before, after in pairwise(served) if before > 10]
    assert 4 <= max(pauses) <= 7  # a tenth of the time that nothing has changed for, and what lies between two looks
    (uid,) = controller._kept
    controller._touch(uid)
    await controller.look()
    assert served[-1] == now[0]
    touched = len(served)
    for _ in range(3):
        now[0] += UNSERVED_SECONDS
        await controller.look()
    assert len(served) == touched + 3
    await controller.close()


async def test_a_slots_key_goes_with_it_and_comes_back_with_it(api: FakeApi) -> None:
    controller = a_controller(api)
    for _ in range(2):
        await look_and_plan(controller)
    path = next(each for each in api.objects if "/statefulsets/" in each)
    key = f"/api/v1/namespaces/ns/secrets/{path.rpartition('/')[2]}-key"
    assert key in api.objects
    (kept,) = controller._kept.values()
    deployment = deployment_from_object(api.objects[f"{LLMDS}/chat"])
    await controller._hands._delete(DeleteStatefulSet(path.rpartition("/")[2]), deployment, kept)
    assert [each.path for each in api.wrote("DELETE", "/")] == [key, path]  # what is looked for again goes last
    await look_and_plan(controller)
    assert {key, path} <= set(api.objects)
    await controller.close()


async def test_another_operator_goes_on_where_the_first_stopped(api: FakeApi) -> None:
    await looked(api, 2)
    keys = api.objects["/api/v1/namespaces/ns/secrets/chat-control"]["data"]
    before = len(api.wrote("POST", "/configmaps"))
    await looked(api, 2)
    assert api.objects["/api/v1/namespaces/ns/secrets/chat-control"]["data"] == keys
    assert len(api.wrote("POST", "/configmaps")) == before


async def test_two_deployments_never_get_the_same_device(api: FakeApi, model: Path) -> None:
    for name in ("chat", "other"):
        api.put(f"{LLMDS}/{name}", a_deployment(name, model, placement={"maxReplicas": 1}))
    await looked(api, 3)  # both are planned at once; who is done last is planned anew
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
    controller = a_controller(api)
    await look_and_plan(controller)
    del api.objects[f"{LLMDS}/chat"]
    await controller.look()
    assert not controller._kept
    await controller.close()


async def test_only_the_leader_acts(api: FakeApi) -> None:
    leads = False
    controller = Controller(kube_of(api.url), OPTIONS, lambda: leads, InThread())
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


GATEWAY = "/apis/apps/v1/namespaces/ns/deployments/chat-gateway"


async def test_a_foreign_object_is_named_and_left_as_it_is(api: FakeApi) -> None:
    foreign = {"kind": "Deployment", "metadata": {"name": "chat-gateway", "namespace": "ns"}, "spec": {"replicas": 7}}
    api.put(GATEWAY, foreign)
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, InThread())
    await controller.look()
    deployment = deployment_from_object(api.objects[f"{LLMDS}/chat"])
    manifest = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "chat-gateway", "namespace": "ns"}}
    with pytest.raises(ForeignObjectError, match=r"Deployment chat-gateway .*another name than 'chat'"):
        await apply_own(kube_of(api.url), deployment, manifest)
    await controller.look()
    assert api.objects[GATEWAY]["spec"] == {"replicas": 7}
    assert not api.wrote("PATCH", "/deployments/chat-gateway")


async def test_what_a_deleted_deployment_of_the_name_left_is_waited_for_and_orphans_are_adopted(api: FakeApi) -> None:
    deployment = deployment_from_object(api.objects[f"{LLMDS}/chat"])
    own = metadata(deployment, "chat-gateway", labels(deployment, "gateway"))
    manifest = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": own}
    (owner,) = own["ownerReferences"]
    api.put(GATEWAY, {**manifest, "metadata": {**own, "ownerReferences": [{**owner, "uid": "earlier"}]}})
    with pytest.raises(ForeignObjectError, match="earlier LLMDeployment"):
        await apply_own(kube_of(api.url), deployment, manifest)
    api.put(GATEWAY, {**manifest, "metadata": {**own, "ownerReferences": []}})
    await apply_own(kube_of(api.url), deployment, manifest)
    assert api.objects[GATEWAY]["metadata"]["ownerReferences"] == [owner]


async def test_the_first_apply_of_an_object_is_not_forced(api: FakeApi) -> None:
    await looked(api, 2)
    forced = [request.query["force"] for request in api.wrote("PATCH", "/deployments/chat-gateway")]
    assert forced == [["false"]]


async def test_secrets_are_created_and_never_applied_over(api: FakeApi) -> None:
    path = "/api/v1/namespaces/ns/secrets/chat-control"
    api.put(path, {"kind": "Secret", "metadata": {"name": "chat-control", "namespace": "ns"}, "data": {"key": "eA=="}})
    await looked(api, 2)
    assert api.objects[path]["data"] == {"key": "eA=="}
    assert not api.wrote("PATCH", "/secrets/")
    assert not api.wrote("PATCH", "/statefulsets/")  # nothing runs with a key that somebody else chose


async def test_what_tenants_may_not_use_is_neither_planned_nor_rendered(api: FakeApi, model: Path) -> None:
    pod = {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}
    api.put(f"{LLMDS}/chat", a_deployment("chat", model, runtime={"pod": pod}))
    await looked(api, 2)
    assert not api.wrote("POST", "/configmaps")
    assert not api.wrote("PATCH", "/statefulsets/")
    opened = replace(OPTIONS, tenants=TenantRules(volumes=("hostPath",)))
    controller = Controller(kube_of(api.url), opened, lambda: True, InThread())
    await look_and_plan(controller)
    assert api.wrote("POST", "/configmaps")
    await controller.close()


async def test_a_foreign_stateful_set_that_is_labelled_like_a_slot_is_never_removed(api: FakeApi) -> None:
    await looked(api, 2)
    (own,) = [each for path, each in api.objects.items() if "/statefulsets/" in path][:1]
    owner = {"kind": "Database", "name": "db", "uid": "another", "controller": True}
    path = "/apis/apps/v1/namespaces/ns/statefulsets/db"
    api.put(path, {**own, "metadata": {**own["metadata"], "name": "db", "uid": "db", "ownerReferences": [owner]}})
    deployment = deployment_from_object(api.objects[f"{LLMDS}/chat"])
    source = Lists(kube_of(api.url), ())
    await source.refresh()
    snapshot = source.stock.part("ns", "chat")
    assert "db" not in snapshot.stateful_sets_of(deployment)
    assert own["metadata"]["name"] in snapshot.stateful_sets_of(deployment)


async def test_a_checkpoint_that_is_not_whole_is_told_before_slots_are_made(api: FakeApi, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    await looked(api, 2)
    status = api.objects[f"{LLMDS}/chat"]["status"]
    planned = next(condition for condition in status["conditions"] if condition["type"] == "Planned")
    assert planned["reason"] == "ModelUnavailable"
    assert "one.safetensors is missing" in planned["message"]
    assert not api.wrote("PATCH", "/statefulsets/")
