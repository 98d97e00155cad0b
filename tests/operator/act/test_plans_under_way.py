"""A plan may take minutes: what moves in the cluster meanwhile neither begins it anew without need nor lets it be taken wrongly."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from strata_operator.act.clock import Clock
from strata_operator.act.controller import QUIET_SECONDS, Controller
from strata_operator.act.planner_call import Answer, Question
from strata_operator.act.planners import Planners
from strata_operator.render.records import stamp
from strata_planner.question.cluster import Cluster
from tests.operator.act.test_controller import LLMDS, OPTIONS, InThread, a_deployment, a_node, look_and_plan
from tests.operator.commands.test_cli import CONFIG
from tests.operator.fake_api import FakeApi, serving
from tests.operator.observe.test_kube import kube_of

NOT_LONG_AGO = stamp(datetime.now(UTC) - timedelta(seconds=5))
EPOCH = "/api/v1/namespaces/ns/configmaps/chat-epoch-1"


class Slow(InThread):
    """Answers when it is told to. `asked`: the nodes of each question."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.asked: list[list[str]] = []

    async def answer(self, question: Question) -> Answer:
        self.asked.append([node.name for node in question.cluster.nodes])
        await self.done.wait()
        return await super().answer(question)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApi]:
    """Three nodes that are CPU devices and one that is none; one deployment, which takes one of them."""
    (tmp_path / "config.json").write_text(CONFIG)
    fake = FakeApi()
    for name in ("a", "b", "c"):
        fake.put(f"/api/v1/nodes/{name}", a_node(name))
    fake.put("/api/v1/nodes/other", {"metadata": {"name": "other"}, "spec": {}, "status": a_node("other")["status"]})
    fake.put(f"{LLMDS}/chat", a_deployment("chat", tmp_path, placement={"maxStages": 1}))
    with serving(fake):
        yield fake


def cordon(api: FakeApi, name: str) -> None:
    api.objects[f"/api/v1/nodes/{name}"]["spec"]["unschedulable"] = True


def remember(api: FakeApi, node: str, *, until: str) -> None:
    """As if a slot there had refused."""
    exclusion = {"node": node, "reason": "R", "message": "m", "epoch": 1, "strikes": 1, "until": until}
    status = {"observedGeneration": 1, **api.objects[f"{LLMDS}/chat"].get("status", {}), "exclusions": [exclusion]}
    api.objects[f"{LLMDS}/chat"]["status"] = status


def planning(api: FakeApi) -> tuple[Controller, Slow]:
    slow = Slow()
    return Controller(kube_of(api.url), OPTIONS, lambda: True, slow), slow


async def finished(controller: Controller, slow: Slow) -> None:
    slow.done.set()
    await look_and_plan(controller)
    await controller.close()


async def test_nodes_that_come_back_or_were_never_in_it_do_not_begin_it_anew(api: FakeApi) -> None:
    remember(api, "b", until="2099-01-01T00:00:00Z")
    controller, slow = planning(api)
    await controller.look()
    remember(api, "b", until=NOT_LONG_AGO)
    cordon(api, "other")
    await controller.look()
    assert slow.asked == [["a", "c"]]
    await finished(controller, slow)
    notes = api.objects[EPOCH]["metadata"]["annotations"]
    assert notes["strata.dev/without"]  # so that a better plan is looked for with b
    assert len(slow.asked) == 1


async def test_who_waits_for_a_first_plan_is_not_looked_at_for_nothing(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, served = [0.0], list[float]()
    serve = Controller._serve

    async def counted(self: Controller, *rest: Any) -> None:
        served.append(now[0])
        await serve(self, *rest)

    monkeypatch.setattr(Controller, "_serve", counted)
    slow = Slow()
    controller = Controller(kube_of(api.url), OPTIONS, lambda: True, slow, clock=Clock(seconds=lambda: now[0]))
    await controller.look()
    await controller.look()  # what the first one wrote
    before = len(served)
    while now[0] < QUIET_SECONDS - 1:
        now[0] += 1.0
        await controller.look()
    assert len(served) == before
    now[0] += 2.0
    await controller.look()
    assert len(served) == before + 1
    await finished(controller, slow)
    assert EPOCH in api.objects


async def test_a_node_that_it_counts_on_and_that_is_closed_begins_it_anew(api: FakeApi) -> None:
    controller, slow = planning(api)
    await controller.look()
    cordon(api, "b")
    await controller.look()
    await finished(controller, slow)
    assert slow.asked == [["a", "b", "c"], ["a", "c"]]


async def test_who_waits_for_a_turn_is_planned_on_what_is_there_when_it_comes(api: FakeApi, tmp_path: Path) -> None:
    """Nodes of a new cluster come one by one; a question that has not been begun is of all of them."""
    api.put(f"{LLMDS}/second", a_deployment("second", tmp_path, placement={"maxStages": 1}))
    slow = Slow()
    one_by_one = replace(OPTIONS, limits=replace(OPTIONS.limits, side_by_side=1))
    controller = Controller(kube_of(api.url), one_by_one, lambda: True, slow)
    await controller.look()
    api.put("/api/v1/nodes/d", a_node("d"))
    await controller.look()
    assert slow.asked == [["a", "b", "c"]]
    await finished(controller, slow)
    first, *others = slow.asked
    assert first == ["a", "b", "c"]
    assert others
    assert all("d" in nodes for nodes in others)


async def test_status_that_is_to_be_written_first_does_not_break_it_off(api: FakeApi) -> None:
    controller, slow = planning(api)
    await controller.look()
    remember(api, "z", until="2026-01-01T00:00:00Z")  # to be forgotten
    for _ in range(2):
        await controller.look()
    assert not api.objects[f"{LLMDS}/chat"]["status"].get("exclusions")
    await finished(controller, slow)
    assert len(slow.asked) == 1


async def test_what_nobody_waits_for_any_more_is_broken_off(api: FakeApi) -> None:
    controller, _ = planning(api)
    await controller.look()
    api.objects[f"{LLMDS}/chat"]["spec"]["paused"] = True
    for _ in range(2):
        await controller.look()
    assert not controller._planners._orders
    await controller.close()


class Gate:
    """Answers when it is told to, whoever asks."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def answer(self, question: Question) -> Answer:
        self.asked.append(question.deployment["name"])
        await asyncio.Event().wait()
        raise AssertionError

    def warm(self) -> None: ...

    async def close(self) -> None: ...


def a_question(name: str) -> Question:
    return Question({"name": name}, Cluster(nodes=()))


async def test_a_wish_that_becomes_a_loss_goes_before_the_others() -> None:
    gate = Gate()
    planners = Planners(gate, 1, lambda: None)
    for name in ("first", "second"):
        planners.want(name, a_question(name), urgent=False)
    await asyncio.sleep(0)
    planners.hurry("second")
    await asyncio.sleep(0)
    assert gate.asked == ["first", "second"]
    await planners.close()


async def test_a_plan_that_somebody_else_broke_off_is_tried_again() -> None:
    told = asyncio.Event()
    planners = Planners(Gate(), 1, told.set)
    planners.want("chat", a_question("chat"), urgent=False)
    await asyncio.sleep(0)
    order = planners._orders["chat"].task
    assert order is not None
    order.cancel()
    await told.wait()
    answer = planners.answer("chat")
    assert answer is not None
    assert answer.passing
    await planners.close()
