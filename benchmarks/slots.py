"""Slots as processes for benchmarks: start, serve a plan, count what each stage did, end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from strata_planner.contract.control import GetStatus, RoleStats, SlotAddress
from strata_planner.contract.environment import SLOT_ENVIRONMENT
from strata_planner.contract.plan import Plan
from strata_runtime.wire.client import LeaderClient, PipelineClient, SlotClient, greedy

_CONTROL_KEY = "benchmarks"
_VOCABULARY = 1000  # prompts use the first tokens of any vocabulary


def free_address() -> SlotAddress:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    control, data, request = (one.getsockname()[1] for one in held)
    for one in held:
        one.close()
    return SlotAddress(host="127.0.0.1", control_port=control, data_port=data, request_port=request)


class SlotProcess(SlotClient):
    """A fresh slot in a process of its own, bound to `core` as a pod with whole processors is; None: to none."""

    def __init__(self, name: str, threads: int = 1, core: int | None = None) -> None:
        address = free_address()
        command = [sys.executable, "-m", "strata_runtime.slot", "--name", name, "--threads", str(threads)]
        command += ["--control-port", str(address.control_port)]
        environment = {"STRATA_CONTROL_KEY": _CONTROL_KEY, "OMP_NUM_THREADS": str(threads), "STRATA_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(command, env={**SLOT_ENVIRONMENT, **os.environ, **environment})
        if core is not None:
            os.sched_setaffinity(self.process.pid, {core})  # before it starts threads: they inherit it
        super().__init__(name, address, _CONTROL_KEY)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        super().close()


@dataclass(frozen=True)
class Served:
    """One measured run: tokens of all answers per second, and each slot's share of the time spent computing."""

    tokens_per_second: float
    seconds: float
    busy: Mapping[str, float]


class ServedPipeline:
    """A plan in force on slot processes."""

    def __init__(self, client: PipelineClient, leader: LeaderClient) -> None:
        self._client = client
        self._leader = leader
        self._run = 0

    def measure(self, sequences: int, prompt: int, answer: int, *, ragged: bool = False) -> Served:
        """Generate `answer` tokens for `sequences` prompts at once, which share nothing with any that were run before.

        Ragged: of a quarter to seven quarters of these lengths, the same in every run.
        """
        self._run += 1
        names = [f"{self._run}-{number}" for number in range(sequences)]
        submits = [
            greedy(name, [(7 * number + place) % _VOCABULARY for place in range(lengths[0])], lengths[1], salt=name)
            for number, name in enumerate(names)
            for lengths in [(_ragged(prompt, 5 * number), _ragged(answer, 3 * number)) if ragged else (prompt, answer)]
        ]
        before = self._stats()
        started = time.perf_counter()
        self._leader.generate(submits)
        seconds = time.perf_counter() - started
        after = self._stats()
        busy = {name: (after[name].busy_seconds - before[name].busy_seconds) / seconds for name in after}
        return Served(sum(each.max_tokens for each in submits) / seconds, seconds, busy)

    def _stats(self) -> dict[str, RoleStats]:
        return {name: slot.ask(GetStatus()).roles[0] for name, slot in self._client.slots.items()}


def _ragged(length: int, number: int) -> int:
    return length * (1 + number % 7) // 4


@contextlib.contextmanager
def slot_processes(plan: Plan, threads: int = 1) -> Iterator[dict[str, SlotProcess]]:
    """A fresh process for every slot of the plan, ended on the way out."""
    names = list(dict.fromkeys(stage.slot for replica in plan.replicas for stage in replica.stages))
    slots: dict[str, SlotProcess] = {}
    try:
        cores = sorted(os.sched_getaffinity(0))
        for place, name in enumerate(names):
            core = cores[place] if threads == 1 and len(names) <= len(cores) else None
            slots[name] = SlotProcess(name, threads, core)
        yield slots
    finally:
        for slot in slots.values():
            slot.close()


@contextlib.contextmanager
def served(plan: Plan, threads: int = 1) -> Iterator[ServedPipeline]:
    """A plan in force."""
    with slot_processes(plan, threads) as slots:
        client = PipelineClient(slots)
        yield ServedPipeline(client, client.serve(plan))
