"""One fault after another in a local deployment that serves, and the moments of each: noticed, planned, in force, next token.

Used by `benchmarks.kills`. What is seen of the deployment is what it tells its callers; nothing here reaches into it. The process that
runs this is the controller: what befalls that is another one's doing (`absence`).
"""

import asyncio
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from benchmarks import absence, hanging_slot
from benchmarks.apart import Apart, From
from benchmarks.load.answers import Answer
from strata_operator.local.deployment import LocalDeployment

FaultKind = Literal[
    "kill",
    "two at once",
    "during the repair",
    "one of each replica",
    "hung",
    "stuck",
    "deaf",
    "gone",
    "gone late",
    "cut off from its neighbours",
    "cut off from the gateway",
    "cut off from the controller",
    "cut off from everybody",
    "killed unattended",
    "back unattended",
]
_CUTS: dict[FaultKind, From] = {
    "cut off from its neighbours": "its neighbours",
    "cut off from the gateway": "the gateway",
    "cut off from the controller": "the controller",
    "cut off from everybody": "everybody",
}
# A process that is stopped whole; one whose step never ends; one that answers nothing meanwhile but heartbeats.
_HANGS: dict[FaultKind, signal.Signals] = {
    "hung": signal.SIGSTOP,
    "stuck": hanging_slot.WAITS,
    "deaf": hanging_slot.KEEPS_THE_LOCK,
}
# For good: whatever is started in its place ends at once, as one that finds no device, or when it answers, as one that cannot use it.
_FOR_GOOD: tuple[FaultKind, ...] = ("gone", "gone late")
_DURING_SECONDS = 0.4  # the second loss comes so much later at most
_LATE_SECONDS = (
    2.0  # of two replicas that lost a slot each, the process of one is stopped for so long as soon as it starts
)
_PATIENCE_SECONDS = 90.0
_SILENT_TIMES = 4.0  # a stream's usual pause between two tokens
_BRIEF_SECONDS = (0.3, 4.0)  # cuts within the grace,
_BEYOND_SECONDS = (1.0, 4.0)  # and so much longer than it
_AWAY_SECONDS = (3.0, 8.0)  # of a controller without standing orders
_SETTLE_SECONDS = 2.0  # after a cut: a silence that began in it is noticed by then


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
    healed: float | None = None  # a cut has ended, or the controller is back
    plans: int = 0  # that do without a victim, until the next fault
    epochs: int = 0  # new ones in force until then
    survivor_restarts: int = 0  # processes that were none of the victims, and have another id

    STEPS: ClassVar = ("noticed", "planned", "in_force", "next_token", "every_stream")
    COUNTS: ClassVar = ("plans", "epochs", "survivor_restarts")

    def __str__(self) -> str:
        told = {name: getattr(self, name) for name in ("healed", *self.STEPS)}
        times = ", ".join(f"{name} {value:.3f}" for name, value in told.items() if value is not None)
        return f"{self.kind} of {', '.join(self.victims)}{' (leads)' if self.led else ''}: {times}"

    def as_json(self) -> dict[str, object]:
        names = ("kind", "victims", "led", "healed", *self.STEPS, *self.COUNTS)
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
    """Breaks things, one at a time, and looks at the deployment whenever that changes. `net`: of slots that are to be cut off."""

    grace_seconds: float
    net: Apart | None = None
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._now: Fault | None = None
        self._more = False  # this fault is not all yet
        self._epoch = 0
        self._plan: object = None
        self._pids: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._counted = 0  # the newest epoch in force
        self._served: object = None  # the plan

    def look(self, deployment: LocalDeployment) -> None:
        """Called after every change."""
        self._count(deployment)
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

    def _count(self, deployment: LocalDeployment) -> None:
        """What else changes by a fault, also after it is over."""
        epoch, plan, pids = _newest(deployment), deployment.plan, deployment.pids
        if self.faults:
            fault = self.faults[-1]
            anew = {name for name, pid in pids.items() if self._lives.get(name, pid) != pid}
            fault.survivor_restarts += len(anew - set(fault.victims))
            fault.epochs += epoch > self._counted
            fault.plans += plan is not self._served and not set(fault.victims) <= {stage.slot for stage in plan.stages}
        self._counted, self._served = max(epoch, self._counted), plan
        self._lives |= pids

    async def strike(self, deployment: LocalDeployment, kind: FaultKind, draw: random.Random) -> None:
        """Returns once the deployment serves again. Raises TimeoutError where it does not."""
        await deployment.ready()
        slots = sorted({stage.slot for stage in deployment.plan.stages})
        leaders = {stage.slot for stage in deployment.plan.stages if stage.leader}
        among = sorted(leaders) if kind == "cut off from the gateway" else slots  # which speaks with no other
        victims = tuple(draw.sample(among, 2 if kind in {"two at once", "during the repair"} else 1))
        if kind == "one of each replica":
            replicas = draw.sample(deployment.plan.replicas, 2)
            victims = tuple(draw.choice(replica.stages).slot for replica in replicas)
        self._epoch = _newest(deployment)
        self._plan, self._pids = deployment.plan, deployment.pids
        fault = Fault(kind, victims, time.monotonic(), not leaders.isdisjoint(victims))
        self.faults.append(fault)
        if kind in _CUTS:
            await self._cut(deployment, fault, draw)
        elif kind in {"killed unattended", "back unattended"}:
            await self._while_away(deployment, fault, draw)
        else:
            await self._break(deployment, fault, draw)

    async def _break(self, deployment: LocalDeployment, fault: Fault, draw: random.Random) -> None:
        kind, victims = fault.kind, fault.victims
        later = draw.uniform(0, _DURING_SECONDS)
        self._now, self._more = fault, kind == "during the repair"
        hits = 0 if kind in _HANGS else 2 if kind in {"two at once", "one of each replica"} else 1
        for victim in victims[:hits]:
            _send(self._pids[victim], signal.SIGKILL)
        if kind in _HANGS:
            _send(self._pids[victims[0]], _HANGS[kind])
        async with asyncio.timeout(_PATIENCE_SECONDS):
            if kind == "during the repair":
                await asyncio.sleep(later)
                self._more = False
                self._epoch = _newest(deployment)
                _send(deployment.pids.get(victims[1], 0), signal.SIGKILL)
            if kind == "one of each replica":
                await self._start_late(deployment, victims[1])
            while self._now is not None:
                self._changed.clear()
                if kind in _FOR_GOOD:
                    self._kill_again(deployment, victims[0], late=kind == "gone late")
                await self._changed.wait()

    async def _start_late(self, deployment: LocalDeployment, victim: str) -> None:
        """Its next process: it is there, and says nothing yet."""
        while (pid := deployment.pids.get(victim, 0)) in {0, self._pids[victim]}:
            self._changed.clear()
            await self._changed.wait()
        _send(pid, signal.SIGSTOP)
        await asyncio.sleep(_LATE_SECONDS)
        _send(pid, signal.SIGCONT)

    async def _cut(self, deployment: LocalDeployment, fault: Fault, draw: random.Random) -> None:
        """Within the grace or beyond it, both as often."""
        assert self.net is not None, "slots that are to be cut off have namespaces of their own"
        (victim,) = fault.victims
        brief = draw.uniform(*_BRIEF_SECONDS)
        seconds = draw.choice((brief, self.grace_seconds + draw.uniform(*_BEYOND_SECONDS)))
        self.net.cut(victim, _CUTS[fault.kind], deployment.slot_endpoints[victim].port)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.net.heal(victim)
        fault.healed = time.monotonic() - fault.at
        await asyncio.sleep(_SETTLE_SECONDS)
        await self._until(lambda: self._is_whole(deployment), deployment)
        fault.in_force = time.monotonic() - fault.at

    async def _while_away(self, deployment: LocalDeployment, fault: Fault, draw: random.Random) -> None:
        """This process is stopped meanwhile."""
        (victim,) = fault.victims
        wanted = absence.Absence(
            controller=os.getpid(),
            victim=victim,
            pid=self._pids[victim],
            url=deployment.options.url if deployment.options.orders else "",
            seconds=draw.uniform(*_AWAY_SECONDS),
            namespaces=self.net.files if self.net is not None and fault.kind == "back unattended" else {},
        )
        moments = await asyncio.to_thread(absence.play, wanted)
        fault.at, fault.healed = moments.lost, moments.back - moments.lost
        fault.planned = None if moments.carried_out is None else moments.carried_out - moments.lost
        await self._until(lambda: self._is_whole(deployment) and _newest(deployment) > self._epoch, deployment)
        fault.in_force = time.monotonic() - fault.at

    async def _until(self, holds: Callable[[], bool], deployment: LocalDeployment) -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not holds():
                self._changed.clear()
                await self._changed.wait()
            await deployment.ready()

    def _kill_again(self, deployment: LocalDeployment, victim: str, *, late: bool) -> None:
        """Whatever is started in its place, at once or as soon as it answers."""
        pid = deployment.pids.get(victim, 0)
        if pid != self._pids.get(victim) and (not late or victim in deployment.slot_statuses):
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
        if fault.kind in _FOR_GOOD:
            return deployment.plan is not self._plan
        return any(status.prepare.epoch > self._epoch for status in deployment.slot_statuses.values())

    def _is_whole(self, deployment: LocalDeployment) -> bool:
        """All slots of the plan and the gateway are of one epoch, and nobody misses anybody."""
        slots, gateway = {stage.slot for stage in deployment.plan.stages}, deployment.gateway_status
        statuses = [status for name, status in deployment.slot_statuses.items() if name in slots]
        epochs = {status.committed_epoch for status in statuses}
        return (
            len(statuses) == len(slots)
            and gateway is not None
            and epochs == {gateway.epoch}
            and gateway.leaders_connected == len(deployment.plan.replicas)
            and not any(status.lost_peers for status in statuses)
        )

    def _is_in_force(self, deployment: LocalDeployment) -> bool:
        slots, gateway = {stage.slot for stage in deployment.plan.stages}, deployment.gateway_status
        epochs = {status.committed_epoch for name, status in deployment.slot_statuses.items() if name in slots}
        known = slots <= set(deployment.slot_statuses) and len(epochs) == 1
        return known and max(epochs) > self._epoch and gateway is not None and gateway.epoch == max(epochs)


def _newest(deployment: LocalDeployment) -> int:
    """Of the epochs that slots serve."""
    return max((status.committed_epoch for status in deployment.slot_statuses.values()), default=0)


def _send(pid: int, number: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
