"""HexGen's layouts on this machine: a stage of two devices before one of one, the other way round, two devices in a stage, two in a row.

`python -m benchmarks.hexgen_run [decode] [prompts] [--json FILE]`, four minutes each on two quiet cores. Three devices of half a core each: all ranks of a stage run in the same
half of every period (`benchmarks.throttle`), each on a core of its own, those of the two stages in different halves, so that three ranks never want more
than two cores. Plans are priced for devices of half this machine's measured rates; layers are dealt by the planner. The 246M model.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import make_model, profile
from benchmarks.rows import Row, run
from benchmarks.served_plans import loopback, run_plan, simulated
from benchmarks.slots import SlotProcess, slot_processes
from benchmarks.throttle import Turn, slower, throttled, with_children
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts.search import laid, layout_plan
from strata_runtime.wire.client import PipelineClient

LAYOUTS = ((2, 1), (1, 2), (2,), (1, 1))  # devices of each stage
SHARE, RUNS = 0.5, 5
LOADS = {
    "decode": Workload(prompt_tokens=48, output_tokens=40, concurrency=16),  # bound by memory, which both cores share
    "prompts": Workload(prompt_tokens=128, output_tokens=8, concurrency=6),  # by arithmetic
}
ALIKE = 0.05  # layouts whose plans differ by less have no order


@dataclass(frozen=True)
class Ran:
    """Tokens a second: planned for a pipeline that is never empty, and of one batch, simulated and as it ran."""

    degrees: Sequence[int]
    layers: Sequence[int]
    planned: float
    simulated: float
    measured: float


def question(model: Path, degrees: Sequence[int], load: Workload) -> PlanRequest:
    """A node for each stage, with its devices: a slot of its own, whose ranks are processes."""
    rates = msgspec.to_builtins(slower(profile(), SHARE))
    nodes = tuple(
        Node(name, (Device("cpu", count=degree, memory_bytes=4 << 30, threads=1, profile=rates),))
        for name, degree in zip("ab", degrees, strict=False)
    )
    return PlanRequest(
        deployment="bench",
        model_uri=str(model),
        model=Model.from_folder(model),
        cluster=Cluster(nodes, default_link=loopback()),
        workload=load,
        max_model_len=load.sequence_tokens + 16,
        allowed_bits=(16,),
        solver="layout",
        tensor_parallel=(1, 2),
    )


def planned(request: PlanRequest, degrees: Sequence[int]) -> Plan:
    plan = layout_plan(laid(request, (tuple(degrees),), degrees=(tuple(degrees),)))
    (replica,) = plan.replicas
    assert [stage.tensor_parallel for stage in replica.stages] == list(degrees)
    return plan


def bind(slot: int) -> None:
    """Each rank of a slot to a core of its own: who is continued every few milliseconds would first share one with the other."""
    leader = psutil.Process(slot)
    ranks = [leader, *(each for each in leader.children(recursive=True) if each.ppid() != slot)]  # of its nursery
    for core, rank in zip(sorted(os.sched_getaffinity(0)), ranks, strict=False):
        for thread in rank.threads():
            os.sched_setaffinity(thread.id, {core})


@contextmanager
def held(plan: Plan, slots: dict[str, SlotProcess]) -> Iterator[None]:
    """The first stage in the first half of every period, the second in the other."""
    stages = plan.replicas[0].stages
    pids = [with_children(slots[stage.slot].process.pid) for stage in stages]
    with throttled([Turn(each, at * SHARE, (at + 1) * SHARE) for at, each in enumerate(pids)]):
        yield


class Serving:
    """A layout in force on slots of its own, which wait while others have their turn."""

    def __init__(self, stack: ExitStack, model: Path, degrees: Sequence[int], load: Workload) -> None:
        self.degrees, self._load = degrees, load
        self._request = question(model, degrees, load)
        self._plan = planned(self._request, degrees)
        self._slots = stack.enter_context(slot_processes(self._plan, bound=False))
        self._leader = PipelineClient(self._slots).serve(self._plan)
        self._rates: list[float] = []
        run_plan(self._leader, self._slots, load, "warm")
        for slot in self._slots.values():  # all their threads are there
            bind(slot.process.pid)

    def run(self) -> None:
        with held(self._plan, self._slots):
            served = run_plan(self._leader, self._slots, self._load, str(len(self._rates)))
        self._rates.append(served.tokens_per_second)

    @property
    def ran(self) -> Ran:
        layers = [len(stage.bits) for stage in self._plan.stages]
        told = simulated(self._plan, self._request).tokens_per_second
        rate = self._plan.prediction.tokens_per_second
        return Ran(self.degrees, layers, rate, told, statistics.median(self._rates))


def serve(model: Path, load: Workload) -> list[Ran]:
    """All layouts, in turn."""
    with ExitStack() as stack:
        layouts = [Serving(stack, model, degrees, load) for degrees in LAYOUTS]
        for _ in range(RUNS):
            for each in layouts:
                each.run()
        return [each.ran for each in layouts]


def ordered(ran: Sequence[Ran]) -> tuple[int, int]:
    """Pairs of layouts whose plans differ, and those of them that were measured in that order."""
    pairs = [sorted(pair, key=lambda each: each.planned) for pair in combinations(ran, 2)]
    apart = [(worse, better) for worse, better in pairs if better.planned > worse.planned * (1 + ALIKE)]
    return len(apart), sum(worse.measured < better.measured for worse, better in apart)


def show(name: str, ran: Sequence[Ran]) -> None:
    table = Table(title=f"{name}: layouts on devices of half a core, tokens/s", title_justify="left")
    for column in ("layout", "layers", "planned", "one batch, simulated", "measured"):
        table.add_column(column, justify="right")
    for each in ran:
        figures = (f"{figure:.1f}" for figure in (each.planned, each.simulated, each.measured))
        table.add_row(str(list(each.degrees)), "/".join(map(str, each.layers)), *figures)
    Console(width=120).print(table)


def measure(loads: Collection[str]) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for name in loads:
            ran = serve(model, LOADS[name])
            show(name, ran)
            apart, right = ordered(ran)
            share = right / apart if apart else None
            rows.append(
                Row(
                    f"hexgen_case_run_{name}",
                    right,
                    "pairs in the planned order",
                    "that plans tell apart",
                    apart,
                    share,
                    1.0,
                )
            )
    return rows


if __name__ == "__main__":
    asked = [each for each in sys.argv[1:] if each in LOADS]
    rest = [each for each in sys.argv[1:] if each not in LOADS]
    run("hexgen_run", partial(measure, asked or LOADS), rest, part=bool(asked))
