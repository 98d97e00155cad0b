"""A leader's first step of an epoch waits for what goes on from the one before, and its last is the one that is under way when it is asked to finish."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata_planner.contract.frames import Submit
from strata_runtime.slot.leader import LeaderWorker
from strata_runtime.wire.client import greedy
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness


class Trickle:
    """A gateway's messages, one behind the other: each is there when somebody has waited for it."""

    def __init__(self, submits: list[Submit]) -> None:
        self.socket = self
        self.incarnation = ""
        self.hello: Any = None
        self._left, self._here = deque(submits[1:]), deque(submits[:1])

    def poll(self, _milliseconds: int) -> int:
        if self._left:
            self._here.append(self._left.popleft())
        return len(self._here)

    def received(self) -> Iterator[tuple[bytes, Submit]]:
        while self._here:
            yield b"gateway", self._here.popleft()

    def own(self, request: str, identity: bytes) -> None:
        """Nobody is answered here."""


class Ready:
    """A poller of one that is readable."""

    def __init__(self, socket: object) -> None:
        self._socket = socket

    def poll(self, _milliseconds: int | None) -> list[tuple[object, int]]:
        return [(self._socket, 1)]


def leader_of(model: Path, submits: list[Submit]) -> LeaderWorker:
    """Whose epoch has ended, with a gateway that sends it these."""
    with PipelineHarness("a") as pipeline:
        pipeline.serve(even_plan(model, ["a"]))
        running = pipeline.threads["a"].slot._running
        assert running is not None
        worker = running.roles[0].worker
    assert isinstance(worker, LeaderWorker)
    gateways: Any = Trickle(submits)
    poller: Any = Ready(gateways)
    worker._gateways, worker._poller = gateways, poller
    return worker


@pytest.mark.parametrize(("delivered", "heard"), [([7], 5), ([], 1)])
def test_what_goes_on_is_heard_whole_before_the_first_step_and_what_is_new_waits_for_nobody(
    tiny_llama: Path, delivered: list[int], heard: int
) -> None:
    worker = leader_of(tiny_llama, [greedy(f"r{number}", [1, 2, 3], 4, delivered) for number in range(5)])
    worker._receive(wait=False)
    assert worker.engine.waiting == heard


def test_who_is_to_finish_begins_no_step(tiny_llama: Path) -> None:
    worker = leader_of(tiny_llama, [greedy("r0", [1, 2, 3], 4)])
    worker._receive(wait=False)
    worker.hold()
    assert not worker._step()
    assert worker.engine.next_step() is not None
