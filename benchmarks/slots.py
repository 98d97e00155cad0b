"""Slots as processes for benchmarks: start, serve a plan, count what each stage did, end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata_planner.contract.control import GetStatus, RoleStats, SlotAddress
from strata_planner.contract.environment import SLOT_ENVIRONMENT
from strata_planner.contract.frames import Submit
from strata_planner.contract.plan import Plan
from strata_runtime.wire.client import LeaderClient, PipelineClient, SlotClient, greedy

_CONTROL_KEY = "benchmarks"
_VOCABULARY = 1000  # prompts use the first tokens of any vocabulary


def free_address() -> SlotAddress:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    control, data, request, pages = (one.getsockname()[1] for one in held)
    for one in held:
        one.close()
    return SlotAddress(host="127.0.0.1", control_port=control, data_port=data, request_port=request, pages_port=pages)


class SlotProcess(SlotClient):
    """A fresh slot in a process of its own, bound to `cores` as a pod with whole processors is; none: to no one. `ranks`: that may share its stages."""

    def __init__(self, name: str, threads: int = 1, cores: Collection[int] = (), ranks: int = 1) -> None:
        address = free_address()
        command = [sys.executable, "-m", "strata_runtime.slot", "--name", name, "--threads", str(threads)]
        command += ["--control-port", str(address.control_port), "--ranks", str(ranks)]
        environment = {"STRATA_CONTROL_KEY": _CONTROL_KEY, "OMP_NUM_THREADS": str(threads), "STRATA_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(command, env={**SLOT_ENVIRONMENT, **os.environ, **environment})
        if cores:
            os.sched_setaffinity(self.process.pid, cores)  # before it starts threads: they inherit it
        super().__init__(name, address, _CONTROL_KEY)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        super().close()


def await_shadows(plan: Plan, slots: Mapping[str, SlotClient]) -> None:
    """Until each slot holds what the plan has it keep. Raises SystemExit where one never will."""
    for name in plan.shadow_orders:
        state = slots[name].until(lambda status: status.shadow is not None and status.shadow.phase != "reading").shadow
        if state is None or state.phase != "held" or state.reason:
            raise SystemExit(f"{name} does not keep all: {state}")


@dataclass(frozen=True)
class Served:
    """One measured run: tokens of all answers per second, and each slot's share of the time spent computing."""

    tokens_per_second: float
    seconds: float
    busy: Mapping[str, float]


@dataclass(frozen=True)
class Heard:
    """Seconds from the start until each token of each sequence came."""

    moments: Sequence[Sequence[float]]

    @property
    def prompts_seconds(self) -> float:
        """Until every sequence had its first token."""
        return max(came[0] for came in self.moments)

    @property
    def decode_rate(self) -> float:
        """Tokens a second while all sequences decode: no prompt is computed any more and none has ended yet."""
        begin, end = self.prompts_seconds, min(came[-1] for came in self.moments)
        return sum(begin < moment <= end for came in self.moments for moment in came) / (end - begin)


class ServedPipeline:
    """A plan in force on slot processes."""

    def __init__(self, client: PipelineClient, leader: LeaderClient) -> None:
        self.client = client
        self._leader = leader
        self._run = 0

    def measure(self, sequences: int, prompt: int, answer: int, *, ragged: bool = False) -> Served:
        """Generate `answer` tokens for `sequences` prompts at once, which share nothing with any that were run before.

        Ragged: of a quarter to seven quarters of these lengths, the same in every run.
        """
        submits = self._submits(sequences, prompt, answer, ragged=ragged)
        before = self._stats()
        started = time.perf_counter()
        self._leader.generate(submits)
        seconds = time.perf_counter() - started
        after = self._stats()
        busy = {name: (after[name].busy_seconds - before[name].busy_seconds) / seconds for name in after}
        return Served(sum(each.max_tokens for each in submits) / seconds, seconds, busy)

    def listen(self, sequences: int, prompt: int, answer: int) -> Heard:
        """The same, and when every token came."""
        submits = self._submits(sequences, prompt, answer)
        moments: dict[str, list[float]] = {each.request: [] for each in submits}
        started = time.perf_counter()
        for submit in submits:
            self._leader.send(submit)
        while any(len(came) < answer for came in moments.values()):
            events = self._leader.events()
            now = time.perf_counter() - started
            for event in events:
                moments[event.request].append(now)
        return Heard(tuple(map(tuple, moments.values())))

    def _submits(self, sequences: int, prompt: int, answer: int, *, ragged: bool = False) -> list[Submit]:
        self._run += 1
        names = [f"{self._run}-{number}" for number in range(sequences)]
        return [
            greedy(name, [(7 * number + place) % _VOCABULARY for place in range(lengths[0])], lengths[1], salt=name)
            for number, name in enumerate(names)
            for lengths in [(_ragged(prompt, 5 * number), _ragged(answer, 3 * number)) if ragged else (prompt, answer)]
        ]

    def _stats(self) -> dict[str, RoleStats]:
        return {name: slot.ask(GetStatus()).roles[0] for name, slot in self.client.slots.items()}


def _ragged(length: int, number: int) -> int:
    return length * (1 + number % 7) // 4


@contextlib.contextmanager
def slot_processes(
    plan: Plan, threads: int = 1, *, bound: bool = True, on: Mapping[str, Collection[int]] | None = None
) -> Iterator[dict[str, SlotProcess]]:
    """A fresh process for every slot of the plan, ended on the way out. `bound`: each to processors of its own, where there are enough; `on`: to these."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    names = list(dict.fromkeys(stage.slot for stage in stages))
    slots: dict[str, SlotProcess] = {}
    try:
        cores = sorted(os.sched_getaffinity(0))
        if on is None:
            own = bound and len(names) * threads <= len(cores)
            on = {name: cores[at * threads : (at + 1) * threads] if own else () for at, name in enumerate(names)}
        for name in names:
            ranks = max(stage.tensor_parallel for stage in stages if stage.slot == name)
            slots[name] = SlotProcess(name, threads, on[name], ranks)
        yield slots
    finally:
        for slot in slots.values():
            slot.close()


@contextlib.contextmanager
def served(plan: Plan, threads: int = 1, *, bound: bool = True) -> Iterator[ServedPipeline]:
    """A plan in force."""
    with slot_processes(plan, threads, bound=bound) as slots:
        client = PipelineClient(slots)
        yield ServedPipeline(client, client.serve(plan))
