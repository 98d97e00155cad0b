"""Devices slower than this machine's, and more of them than it has processors: processes that run for their share of every period alone.

`throttled` stops and continues them by signals, in a process of its own, so that nothing of the benchmark delays it. Turns that do not overlap
never want the same processor. A share is one of a device's time: what waits for others in its turn loses it, as a slow device would.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil
from msgspec import structs

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Plan

PERIOD_SECONDS = 0.005  # short beside a step, whose seconds would vary by a turn's pause
_PR_SET_TIMERSLACK = 29  # of Linux's prctl


@dataclass(frozen=True)
class Turn:
    """Of these processes, with all that they started: from `begin` to `end`, shares of a period."""

    pids: Sequence[int]
    begin: float
    end: float

    @property
    def share(self) -> float:
        return self.end - self.begin


def with_children(pid: int) -> list[int]:
    """Ranks of a slot are processes of its nursery."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def turns_of(plan: Plan, pids: Mapping[str, int], of_nodes: Mapping[str, tuple[float, float]]) -> list[Turn]:
    """Of the slots (`pids`) on these nodes, which run from one share of a period to the other."""
    return [
        Turn(with_children(pids[stage.slot]), *of_nodes[stage.node]) for stage in plan.stages if stage.node in of_nodes
    ]


@contextlib.contextmanager
def throttled(turns: Sequence[Turn], period: float = PERIOD_SECONDS) -> Iterator[None]:
    """Until the end of the block; then all run on."""
    said = [f"{turn.begin}:{turn.end}:{','.join(map(str, turn.pids))}" for turn in turns]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.throttle", str(period), *said])
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)
        for turn in turns:
            _tell(turn.pids, signal.SIGCONT)


def slower(profile: DeviceProfile, share: float) -> DeviceProfile:
    """The device when it has this share of its time, in which others of its node have none."""
    slowed = profile.slowed(share)
    return structs.replace(slowed, node_bandwidth_bytes_per_second=profile.node_bandwidth_bytes_per_second * share)


def _tell(pids: Sequence[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def _run(period: float, turns: Sequence[Turn]) -> None:
    edges = sorted(
        [(turn.begin, signal.SIGCONT, turn.pids) for turn in turns]
        + [(turn.end, signal.SIGSTOP, turn.pids) for turn in turns],
        key=lambda edge: (edge[0], edge[1] == signal.SIGCONT),  # one turn ends before the next begins
    )
    started = time.monotonic() // period * period  # turns of several such processes lie alike
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # sleeps end 0.04 ms late, not 0.09: all edges alike
    while True:
        for at, what, pids in edges:
            time.sleep(max(0.0, started + at * period - time.monotonic()))
            _tell(pids, what)
        started += period


def _turn(text: str) -> Turn:
    begin, end, pids = text.split(":")
    return Turn([int(pid) for pid in pids.split(",")], float(begin), float(end))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _run(float(sys.argv[1]), [_turn(text) for text in sys.argv[2:]])
