"""The controller among troubles: one deployment, record or object that is broken stops no other, and each is named in status."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strata_operator.act import metrics, readings
from strata_operator.act.controller import Controller
from strata_operator.act.lease import NotLeadingError
from strata_operator.decide.backoff import Backoff
from strata_operator.observe.kube import ForbiddenError
from strata_operator.observe.source import Lists
from tests.laws import swept
from tests.operator.act.test_controller import (
    LLMDS,
    OPTIONS,
    InThread,
    a_controller,
    a_node,
    look_and_plan,
    looked,
)
from tests.operator.fake_api import FakeApi, Request
from tests.operator.observe.test_kube import kube_of

Refuse = Callable[[Request], tuple[int, str] | None]


def condition(api: FakeApi, name: str, kind: str) -> dict[str, Any]:
    conditions = api.objects[f"{LLMDS}/{name}"].get("status", {}).get("conditions", [])
    return next((dict(each) for each in conditions if each["type"] == kind), {})


def epochs(api: FakeApi, name: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in api.objects if f"/configmaps/{name}-epoch-" in path)


async def test_what_nobody_foresaw_in_one_deployment_is_its_condition_and_the_others_go_on(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = readings.render

    def breaks(deployment: Any, *rest: Any) -> Any:
        if deployment.name == "odd":
            raise ZeroDivisionError("a figure was nought")
        return render(deployment, *rest)

    monkeypatch.setattr(readings, "render", breaks)
    await looked(api, 3)
    told = condition(api, "odd", "ReconcileError")
    assert (told["status"], told["reason"]) == ("True", "ZeroDivision")
    assert told["message"] == "ZeroDivisionError: a figure was nought"
    assert api.objects[f"{LLMDS}/chat"]["status"]["phase"] == "Loading"
    assert not condition(api, "chat", "ReconcileError")
    assert [path for path in api.objects if "/statefulsets/chat-" in path]
    monkeypatch.setattr(readings, "render", render)
    await looked(api, 1)
    assert not condition(api, "odd", "ReconcileError")
    assert [path for path in api.objects if "/statefulsets/odd-" in path]


@pytest.mark.parametrize("what", ["/", "/secrets"])
async def test_a_namespace_that_may_not_be_read_is_left_out_whole_and_the_others_go_on(
    api: FakeApi, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was deleted: its Role went with it. A pod of it, on a node that is gone, may have a deployment there."""
    api.refuse = lambda request: (403, "no") if "/namespaces/gone/" in request.path and what in request.path else None
    gone = dict(api.objects[f"{LLMDS}/chat"])
    meta = {**gone["metadata"], "namespace": "gone", "uid": "uid-gone"}
    api.put(f"{LLMDS.replace('/ns/', '/gone/')}/other", {**gone, "metadata": {**meta, "name": "other"}})
    pod = {**meta, "name": "other-0", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    labels = {"app.kubernetes.io/managed-by": "strata", "app.kubernetes.io/instance": "other"}
    api.put("/api/v1/namespaces/gone/pods/other-0", {"metadata": {**pod, "labels": labels}, "spec": {"nodeName": "z"}})
    options = replace(OPTIONS, namespaces=("gone", "ns"))
    controller = Controller(kube_of(api.url), options, lambda: True, InThread())
    for _ in range(2):
        await look_and_plan(controller)
    await controller.close()
    assert api.objects[f"{LLMDS}/chat"]["status"]["phase"] == "Loading"
    assert {request.path for request in api.requests if request.method != "GET" and "/gone/" in request.path} == set()
    assert sum("the namespace gone is left out" in each.getMessage() for each in caplog.records) == 1
    assert metrics.UNREAD.collect()[0].samples[0].value == 1


async def test_where_no_namespace_may_be_read_the_look_fails(api: FakeApi) -> None:
    api.refuse = lambda request: (403, "no") if "/namespaces/" in request.path else None
    with pytest.raises(ForbiddenError):
        await Lists(kube_of(api.url), ("ns", "gone")).refresh()


async def test_a_deployment_that_broke_is_left_alone_until_its_spec_changes(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def breaks(deployment: Any, *_: Any) -> Any:
        tried.append(deployment.name)
        raise KeyError("x")

    controller = a_controller(api)
    await look_and_plan(controller)
    monkeypatch.setattr(readings, "render", breaks)
    for kept in controller._kept.values():
        kept.errors, kept.generation = Backoff(1, float("inf")), 1
    for _ in range(3):
        await controller.look()
    assert tried == []
    api.put(f"{LLMDS}/odd", {**api.objects[f"{LLMDS}/odd"], "metadata": {**_meta(api, "odd"), "generation": 2}})
    for _ in range(3):
        await controller.look()
    assert tried == ["odd"]
    await controller.close()


def _meta(api: FakeApi, name: str) -> dict[str, Any]:
    return dict(api.objects[f"{LLMDS}/{name}"]["metadata"])


BAD_SPECS: dict[str, Any] = {
    "unknown-field": {"model": {"uri": "hf://a/b"}, "nonsense": 1},
    "no-spec": 3,
}


@pytest.mark.parametrize("name", BAD_SPECS)
async def test_an_object_that_no_schema_checked_is_refused_in_its_own_status(api: FakeApi, name: str) -> None:
    api.objects[f"{LLMDS}/odd"]["spec"] = BAD_SPECS[name]
    await looked(api, 2)
    told = condition(api, "odd", "ReconcileError")
    assert told["reason"] == "InvalidInput"
    assert "not accepted" in told["message"]
    assert api.objects[f"{LLMDS}/odd"]["status"]["phase"] == "Failed"
    assert api.objects[f"{LLMDS}/chat"]["status"]["phase"] == "Loading"
    writes = len(api.wrote("PATCH", "/odd/status"))
    await looked(api, 1)
    assert len(api.wrote("PATCH", "/odd/status")) == writes  # it is said once


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("nvidia.com/gpu.memory", "15360XB"),
        pytest.param("nvidia.com/gpu.compute.major", "x", marks=pytest.mark.slow),
        pytest.param("nvidia.com/gpu.memory", "0", marks=pytest.mark.slow),
    ],
)
async def test_a_node_with_an_odd_label_is_refused_by_name(api: FakeApi, label: str, value: str) -> None:
    node = a_node("c")
    node["status"]["allocatable"]["nvidia.com/gpu"] = "1"
    node["metadata"]["labels"] = {
        "nvidia.com/gpu.product": "Tesla-T4",
        "nvidia.com/gpu.memory": "15360",
        "nvidia.com/gpu.compute.minor": "5",
        label: value,
    }
    api.put("/api/v1/nodes/c", node)
    await looked(api, 2)
    assert "node c: the label" in condition(api, "chat", "Inventoried")["message"]
    assert repr(value) in condition(api, "chat", "Inventoried")["message"]
    assert api.objects[f"{LLMDS}/chat"]["status"]["phase"] == "Loading"


async def test_hundreds_of_unusable_nodes_are_said_as_far_as_a_message_goes(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata_operator.observe.inventory.MOST_TOLD", 1000)
    for number in range(260):
        node = a_node(f"node-{number:03}-" + "x" * 100)
        node["spec"]["taints"] = [{"key": "example.org/reserved", "value": "y" * 60, "effect": "NoSchedule"}]
        api.put(f"/api/v1/nodes/{node['metadata']['name']}", node)
    await looked(api, 2)
    message = condition(api, "chat", "Inventoried")["message"]
    assert len(message) == 32_768
    assert message.endswith(" ...")
    assert api.objects[f"{LLMDS}/chat"]["status"]["phase"] == "Loading"


async def test_a_config_map_that_only_looks_like_an_epoch_is_named_and_stops_nothing(api: FakeApi) -> None:
    await looked(api, 2)
    good = api.objects["/api/v1/namespaces/ns/configmaps/odd-epoch-1"]
    for kind in ("configmaps", "secrets"):
        path = f"/api/v1/namespaces/ns/{kind}/odd-epoch-abc"
        labels = {**good["metadata"]["labels"], "strata.dev/epoch": "abc"}
        api.put(path, {"metadata": {"name": "odd-epoch-abc", "namespace": "ns", "labels": labels}, "data": {}})
    await looked(api, 2)
    told = condition(api, "odd", "ReconcileError")
    assert told["message"].startswith("odd-epoch-abc: is no record of an epoch")
    assert api.objects[f"{LLMDS}/odd"]["status"]["phase"] == "Loading"
    assert epochs(api, "odd") == ["odd-epoch-1", "odd-epoch-abc"]
    assert not condition(api, "chat", "ReconcileError")


async def test_an_epoch_of_another_release_is_planned_anew_above_it_and_then_forgotten(api: FakeApi) -> None:
    await looked(api, 2)
    record = api.objects["/api/v1/namespaces/ns/configmaps/odd-epoch-1"]
    record["data"]["plan.json"] = record["data"]["plan.json"].replace('"version":2', '"version":99')
    await looked(api, 3)
    assert epochs(api, "odd") == ["odd-epoch-1", "odd-epoch-2"]
    thing = api.objects[f"{LLMDS}/odd"]
    api.put(f"{LLMDS}/odd", {**thing, "status": {**thing["status"], "committedEpoch": 2}})
    controller = a_controller(api)
    await controller.look()
    for kept in controller._kept.values():
        kept.since, kept.due_at = -1e9, 0.0  # it has listened for long
    await controller.look()
    await controller.close()
    assert epochs(api, "odd") == ["odd-epoch-2"]


REFUSED: dict[str, tuple[int, str]] = {
    "rights": (403, "forbidden: exceeded quota"),
    "contents": (422, "spec.replicas: Invalid value"),
    "webhook": (500, "failed calling webhook policy.example.org: connection refused"),
}


@pytest.mark.parametrize("why", swept(REFUSED, ["rights"]))
async def test_one_object_that_is_refused_is_a_condition_and_the_rest_is_carried_out(api: FakeApi, why: str) -> None:
    code, sentence = REFUSED[why]
    api.refuse = lambda request: REFUSED[why] if _applies(request, "networkpolicies") else None
    await looked(api, 3)
    rendered = condition(api, "chat", "Rendered")
    assert (rendered["status"], rendered["reason"]) == ("False", "ApplyRefused")
    assert f"NetworkPolicy chat-gateway: the API server answers {code}" in rendered["message"]
    assert sentence in rendered["message"]
    kinds = {thing["kind"] for thing in api.objects.values() if thing.get("kind")}
    assert kinds >= {"StatefulSet", "Deployment", "Service", "Secret", "PodDisruptionBudget"}
    api.refuse = lambda _: None
    await looked(api, 2)  # another operator, which remembers no back-off
    assert condition(api, "chat", "Rendered")["status"] == "True"


@pytest.mark.parametrize(
    "part", swept(["networkpolicies/chat-gateway", "llmdeployments/chat/status"], ["llmdeployments/chat/status"])
)
async def test_what_is_refused_is_tried_again_later_and_later(api: FakeApi, part: str) -> None:
    api.refuse = lambda request: (403, "no") if _applies(request, part) else None
    controller = a_controller(api)
    await look_and_plan(controller)
    for _ in range(12):
        await controller.look()
    assert 1 <= len([request for request in api.requests if _applies(request, part)]) <= 6
    await controller.close()


async def test_a_pod_that_may_not_be_ended_stops_nothing(api: FakeApi) -> None:
    labels = {"app.kubernetes.io/managed-by": "strata", "app.kubernetes.io/instance": "gone"}
    for name in ("x-0", "y-0"):
        meta = {"name": name, "namespace": "ns", "labels": labels, "deletionTimestamp": "2026-01-01T00:00:00Z"}
        api.put(f"/api/v1/namespaces/ns/pods/{name}", {"metadata": meta, "spec": {"nodeName": "lost"}})
    api.refuse = lambda request: (403, "no") if (request.method, request.path[-3:]) == ("DELETE", "x-0") else None
    await looked(api, 1)
    assert "/api/v1/namespaces/ns/pods/x-0" in api.objects
    assert "/api/v1/namespaces/ns/pods/y-0" not in api.objects


async def test_an_epoch_that_may_not_be_created_is_said_too(api: FakeApi) -> None:
    api.refuse = lambda request: (
        (403, "exceeded quota") if (request.method, request.path[-10:]) == ("POST", "configmaps") else None
    )
    await looked(api, 3)
    assert "a new epoch of chat: the API server answers 403" in condition(api, "chat", "Rendered")["message"]
    assert not epochs(api, "chat")


async def test_a_status_that_changed_meanwhile_is_not_written_over(api: FakeApi) -> None:
    def another_was_faster(request: Request) -> None:
        if request.path.endswith("/chat/status"):
            api.refuse = lambda _: None
            path = f"{LLMDS}/chat"
            api.put(path, {**api.objects[path], "status": {"phase": "Ready", "committedEpoch": 7}})

    api.refuse = another_was_faster
    controller = a_controller(api)
    await controller.look()
    assert api.objects[f"{LLMDS}/chat"]["status"] == {"phase": "Ready", "committedEpoch": 7}
    assert controller._woken.is_set()  # it looks again
    await controller.close()


class Fence:
    """A lease that ends after some writes."""

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def seconds_left(self) -> float:
        if self.writes == 0:
            raise NotLeadingError("the lease has ended")
        self.writes -= 1
        return 5.0


@pytest.mark.parametrize("writes", [0, 1, 8])
async def test_who_loses_the_lease_within_a_look_writes_nothing_more(api: FakeApi, writes: int) -> None:
    fence = Fence(writes)
    kube = kube_of(api.url).behind(fence)
    controller = Controller(kube, OPTIONS, lambda: fence.writes > 0, InThread())
    for _ in range(3):
        await look_and_plan(controller)
    assert len([request for request in api.requests if request.method != "GET"]) == writes
    await controller.close()


def _applies(request: Request, part: str) -> bool:
    return request.method == "PATCH" and part in request.path
