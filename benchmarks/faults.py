"""One fault after another in a local deployment that serves, and the moments of each: noticed, planned, in force, next token.

Used by `benchmarks.kills`. What is seen of the deployment is what it tells its callers; nothing here reaches into it.
"""

import asyncio
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from benchmarks import hanging_slot
from benchmarks.load.answers import Answer
from strata_operator.local.deployment import LocalDeployment

FaultKind = Literal["kill", "two at once", "during the repair", "hung", "stuck", "deaf", "gone"]
# A process that is stopped whole; one whose step never ends; one that answers nothing meanwhile but heartbeats.
_HANGS: dict[FaultKind, signal.Signals] = {
    "hung": signal.SIGSTOP,
    "stuck": hanging_slot.WAITS,
    "deaf": hanging_slot.KEEPS_THE_LOCK,
}
_DURING_SECONDS = 0.4  # the second loss comes so much later at most
_PATIENCE_SECONDS = 90.0
_SILENT_TIMES = 4.0  # a stream's usual pause between two tokens


@dataclass
class Fault:
    """What befell which slots, and when what followed was seen, in seconds from then on. None: it was not."""

    kind: FaultKind
    victims: tuple[str, ...]
    at: float  # of the machine's steady clock
    led: bool  # one of them was a leader
    noticed: float | None = None
    planned: float | None = None
    in_force: float | None = None
    next_token: float | None = None  # of any stream that had fallen silent
    every_stream: float | None = None  # all of them have gone on

    STEPS: ClassVar = ("noticed", "planned", "in_force", "next_token", "every_stream")

    def __str__(self) -> str:
        times = ", ".join(f"{name} {value:.3f}" for name in self.STEPS if (value := getattr(self, name)) is not None)
        return f"{self.kind} of {', '.join(self.victims)}{' (leads)' if self.led else ''}: {times}"

    def as_json(self) -> dict[str, object]:
        names = ("kind", "victims", "led", *self.STEPS)
        return {name: getattr(self, name) for name in names}

    def take(self, answers: Sequence[Answer]) -> None:
        """The longest silence of each stream that was running, if it is one and begins before the repair was in force."""
        ends = []
        until = self.at + (self.in_force or 0.0)
        for answer in answers:
            gaps = [(later - earlier, earlier, later) for earlier, later in itertools.pairwise(answer.times)]
            here = [gap for gap in gaps if gap[1] < until and gap[2] > self.at]
            if answer.asked < self.at and here:
                longest = max(here)
                usual = statistics.median(seconds for seconds, _, _ in gaps)
                ends += [longest[2] - self.at] * (longest[0] > _SILENT_TIMES * usual)
        if ends:
            self.next_token, self.every_stream = min(ends), max(ends)


@dataclass
class Injector:
    """Breaks things, one at a time, and looks at the deployment whenever that changes."""

    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._now: Fault | None = None
        self._more = False  # this fault is not all yet
        self._epoch = 0
        self._plan: object = None
        self._pids: dict[str, int] = {}

    def look(self, deployment: LocalDeployment) -> None:
        """Called after every change."""
        fault = self._now
        if fault is not None:
            past = time.monotonic() - fault.at
            if fault.noticed is None and self._is_noticed(deployment, fault):
                fault.noticed = past
            if fault.planned is None and self._is_planned(deployment, fault):
                fault.planned = past
            if fault.planned is not None and not self._more and self._is_in_force(deployment):
                fault.in_force = past
                self._now = None
        self._changed.set()

    async def strike(self, deployment: LocalDeployment, kind: FaultKind, draw: random.Random) -> None:
        """Returns once the deployment serves again. Raises TimeoutError where it does not."""
        await deployment.ready()
        slots = sorted({stage.slot for stage in deployment.plan.stages})
        leaders = {stage.slot for stage in deployment.plan.stages if stage.leader}
        victims = tuple(draw.sample(slots, 2 if kind in {"two at once", "during the repair"} else 1))
        later = draw.uniform(0, _DURING_SECONDS)
        self._epoch = max(status.committed_epoch for status in deployment.slot_statuses.values())
        self._plan, self._pids = deployment.plan, deployment.pids
        fault = Fault(kind, victims, time.monotonic(), not leaders.isdisjoint(victims))
        self.faults.append(fault)
        self._now, self._more = fault, kind == "during the repair"
        hits = {"kill": 1, "two at once": 2, "during the repair": 1, "gone": 1}.get(kind, 0)
        for victim in victims[:hits]:
            _send(self._pids[victim], signal.SIGKILL)
        if kind in _HANGS:
            _send(self._pids[victims[0]], _HANGS[kind])
        async with asyncio.timeout(_PATIENCE_SECONDS):
            if kind == "during the repair":
                await asyncio.sleep(later)
                self._more = False
                self._epoch = max(status.committed_epoch for status in deployment.slot_statuses.values())
                _send(deployment.pids.get(victims[1], 0), signal.SIGKILL)
            while self._now is not None:
                self._changed.clear()
                if kind == "gone":
                    self._kill_again(deployment, victims[0])
                await self._changed.wait()

    def _kill_again(self, deployment: LocalDeployment, victim: str) -> None:
        """Whatever is started in its place."""
        pid = deployment.pids.get(victim, 0)
        if pid != self._pids.get(victim):
            self._pids[victim] = pid
            _send(pid, signal.SIGKILL)

    def _is_noticed(self, deployment: LocalDeployment, fault: Fault) -> bool:
        statuses = deployment.slot_statuses
        accused = {peer.slot for status in statuses.values() for peer in status.lost_peers}
        accused |= {name for name, status in statuses.items() if status.hung}
        gone = {name for name in fault.victims if name not in statuses or deployment.pids.get(name) != self._pids[name]}
        return bool(gone or accused & set(fault.victims))

    def _is_planned(self, deployment: LocalDeployment, fault: Fault) -> bool:
        """A plan without the slot that is gone for good; else the next epoch of the same."""
        if fault.kind == "gone":
            return deployment.plan is not self._plan
        return any(status.prepare.epoch > self._epoch for status in deployment.slot_statuses.values())

    def _is_in_force(self, deployment: LocalDeployment) -> bool:
        slots, gateway = {stage.slot for stage in deployment.plan.stages}, deployment.gateway_status
        epochs = {status.committed_epoch for name, status in deployment.slot_statuses.items() if name in slots}
        known = slots <= set(deployment.slot_statuses) and len(epochs) == 1
        return known and max(epochs) > self._epoch and gateway is not None and gateway.epoch == max(epochs)


def _send(pid: int, number: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
