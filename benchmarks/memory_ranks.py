"""Predicted against measured memory of the ranks of a stage: what each process holds beyond what it held before, beside the plan's bytes of each device.

Part of `benchmarks.costs`; alone: `python -m benchmarks.memory_ranks [--json FILE]`, two minutes on two cores. Ranks share the cores where there are
fewer: memory does not mind. The fullest rank of a stage is what has to fit.
"""

import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

import psutil

from benchmarks.memory import GOAL, Mark, Slice, row, serve_the_worst, show, tell
from benchmarks.memory_cases import ARCHITECTURES, Case, each, plan_of
from benchmarks.rows import Row, run
from benchmarks.slots import SlotProcess, slot_processes
from strata_planner.contract.control import GetStatus
from strata_planner.contract.plan import Stage
from strata_planner.question.model import Model
from strata_runtime.wire.client import PipelineClient

_SAMPLE_SECONDS = 0.001
CASES = (
    Case((each(8, 16),), 8, 500, ranks=2),
    Case((each(8, 16),), 8, 500, ranks=3),
    Case((each(8, 16),), 8, 500, ranks=4),
    Case((each(8, 8),), 12, 384, ranks=2),
    Case((each(8, 4),), 12, 384, ranks=3),
)


class RankWatch:
    """The memory of a slot and of the ranks that its nursery forks: bytes of no file, what each had when it was first seen and the most since."""

    def __init__(self, slot: SlotProcess) -> None:
        self.begun: dict[int, int] = {}
        self.most: dict[int, int] = {}
        (nursery,) = psutil.Process(slot.process.pid).children()
        self._children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children")
        self._slot = slot.process.pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            for pid in (self._slot, *map(int, self._children.read_text().split())):
                held = own_bytes(pid)
                self.begun.setdefault(pid, held)
                self.most[pid] = max(self.most.get(pid, 0), held)


def own_bytes(pid: int) -> int:
    """Resident pages that belong to no file (proc_pid_statm(5))."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def measure_case(folder: Path, case: Case) -> Slice:
    plan = plan_of(case, Model.from_folder(folder), str(folder))
    (stage,) = plan.stages
    with slot_processes(plan, bound=False) as slots:
        (slot,) = slots.values()
        slot.ask(GetStatus())
        with RankWatch(slot) as watch:
            leader = PipelineClient(slots).serve(plan)
            marks = {pid: Mark(pid) for pid in watch.begun}
            for mark in marks.values():
                mark.reset()
            serve_the_worst(leader, case)
        peaks = {pid: max(watch.most[pid], mark.private_bytes) - watch.begun[pid] for pid, mark in marks.items()}
    assert len(peaks) == case.ranks, "every rank was seen"
    return Slice(_describe(stage, case), "ranks", stage.memory.total_bytes, max(peaks.values()))


def _describe(stage: Stage, case: Case) -> str:
    return f"{case.ranks} ranks, {len(stage.bits)}x{stage.bits[0]} bits, {case.sequences} x {case.length} tokens"


def measure() -> list[Row]:
    architecture = ARCHITECTURES[0]
    slices = []
    with tempfile.TemporaryDirectory() as folder:
        model = architecture.make(Path(folder) / "model")
        for case in CASES:
            slices.append(measure_case(model, case))
            tell(slices[-1])
    show(slices)
    return [row("memory_error_ranks", slices, goal=GOAL)]


if __name__ == "__main__":
    run("memory_ranks", measure, sys.argv[1:])
