"""An operator that dies at any moment of a change: whoever comes next goes on from what is there. Every write and every message is such a moment."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from strata_operator.observe.kube import Request
from strata_planner.contract.control import Commit, Prepare
from tests.laws import share, swept
from tests.operator.fakes import FakeSlot
from tests.operator.world import AWorld, World


class DiesError(asyncio.CancelledError):
    """Nobody sees to it, and nobody is told."""


@dataclass
class Life:
    """Of one operator: it does so many things, and no more. `said`: what they were; `looks`: at which of its looks."""

    world: World
    most: float = float("inf")
    said: list[str] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    look: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self.world.operator.wire.on_request = self._requests
        self.world.operator.control.on_message = self._tells

    def _requests(self, request: Request) -> None:
        if request.method != "GET":
            self._does(f"{request.method} {request.path.rpartition('/default/')[2]}")

    def _tells(self, process: Any, message: Any) -> None:
        if isinstance(message, Commit):  # whatever the one before has said
            slots = [each for each in slots_of(self.world) if each.prepare.epoch == message.epoch]
            assert all(each.prepare.phase == "prepared" for each in slots), "told to commit while one loads"
        self._does(
            f"{type(message).__name__} {message.epoch}"
            if isinstance(message, Prepare | Commit)
            else type(message).__name__
        )

    def _does(self, what: str) -> None:
        self.is_over = len(self.said) >= self.most
        if self.is_over:
            raise DiesError(what)
        self.said.append(what)
        self.looks.append(self.look)


def slots_of(world: World) -> list[FakeSlot]:
    found = (world.cluster.slot_of(pod) for pod in world.cluster.pods_of("chat"))
    return [slot for slot in found if slot is not None]


def loses_a_node(world: World) -> None:
    world.cluster.set_ready("b", "Unknown")


def is_drained(world: World) -> None:
    world.cluster.cordon("b", closed=True)


def is_edited(world: World) -> None:
    world.edit(workload={"concurrency": 3}, placement={"exclude": ["b"]})


CHANGES: dict[str, Callable[[World], None]] = {
    "a node is lost": loses_a_node,
    "a node is to be drained": is_drained,
    "the spec is edited": is_edited,
}


def lives(world: World, most: float, seconds: int) -> Life:
    """Of an operator that does so many things."""
    life = Life(world, most)
    for _ in range(seconds):
        with suppress(asyncio.CancelledError):
            world.looks(1, every=1)
        if life.is_over:
            break
        life.look += 1
    return life


@pytest.mark.parametrize("change", swept(CHANGES, ["a node is lost"]))
def test_whenever_an_operator_dies_the_next_one_goes_on_from_there(a_world: AWorld, change: str) -> None:
    whole = a_world()
    whole.passes(100)
    CHANGES[change](whole)
    life = lives(whole, float("inf"), 30)
    done = life.said
    assert {"Prepare 2", "Commit 2", "SetRoute"} <= set(done)
    switch = slice(done.index("Commit 2"), done.index("SetRoute") + 1)
    assert set(done[switch]) == {"Commit 2", "SetRoute"}, "requests are held meanwhile: nothing is written"
    assert len(set(life.looks[switch])) == 1, "nor is another look waited for"
    for most in range(0, len(done), max(1, len(done) // share(1000, 125))):
        world = a_world()
        world.passes(100)
        CHANGES[change](world)
        assert lives(world, most, 30).said == done[:most]
        world.operator_starts_anew()
        Life(world)
        world.passes(40)
        told = f"died before {done[most]}, the {most}th of {done}"
        assert (world.status.phase, world.nodes()) == ("Ready", ["a", "c"]), told
        assert {each.status().committed_epoch for each in slots_of(world)} == {world.status.committed_epoch}, told
        numbers = [each.epoch for each in world.status.replans]
        assert numbers == sorted(set(numbers)), told


def test_who_may_not_act_is_not_heard_and_goes_on_as_one_that_has_just_started(a_world: AWorld) -> None:
    """Gateways that hear a controller leave their standing orders alone, whatever it can do."""
    world = a_world()
    world.passes(100)
    served = world.status
    assert served.phase == "Ready"
    operator = world.operator
    assert operator.control.watched
    world.cluster.time.run_until_complete(operator.controller.stand_back())
    assert operator.control.watched == []
    world.passes(60)
    assert operator.control.watched
    assert (world.status.phase, world.status.committed_epoch, world.reasons()) == (
        "Ready",
        served.committed_epoch,
        ["Created"],
    )


def test_a_switch_that_status_cannot_record_is_gone_on_from(a_world: AWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be written is what decisions rest on, also behind the switch."""
    world = a_world()
    world.passes(100)
    answer, refused = world.cluster.answer, list[Request]()

    def no_status(request: Request) -> tuple[int, Any]:
        if request.method != "PATCH" or not request.path.endswith("/status"):
            return answer(request)
        refused.append(request)
        return 403, {"kind": "Status", "reason": "Forbidden", "message": "forbidden"}

    monkeypatch.setattr(world.cluster, "answer", no_status)
    is_drained(world)
    world.looks(60, every=1)
    (chat,) = world.cluster.all("llmdeployments")
    kept = world.operator.controller._kept[chat["metadata"]["uid"]]
    assert kept.unsaid is not None
    assert [(each.epoch, each.reason) for each in kept.unsaid.replans] == [(2, "Drain")]
    assert kept.unsaid.committed_epoch == 2
    assert {each.status().committed_epoch for each in slots_of(world)} == {2}
    assert len(refused) < 20  # later and later
    assert world.status.committed_epoch == 1
    monkeypatch.undo()
    world.passes(120)
    assert (world.status.phase, world.status.committed_epoch, world.nodes()) == ("Ready", 2, ["a", "c"])
