"""HexGen's case study (ICML 2024, section 2, figure 1): one request on 4 A6000, 2 A5000 and 2 A4000. Part of `benchmarks.layouts`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from strata_planner.question.cluster import Accelerator, Cluster, DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.phases import Pair
from strata_planner.search.layouts.solved import nearly_solved, proven

FILE = Path(__file__).parent.parent / "examples" / "clusters" / "hexgen-case.yaml"
WORKLOAD = Workload(prompt_tokens=128, output_tokens=64, concurrency=1)
BITS = 16

Order = tuple[DeviceGroup, ...]


@dataclass(frozen=True)
class Case:
    """`paper`: what the paper says of it."""

    name: str
    order: Order
    layers: Sequence[int]
    paper: str


def case_table(llama: Callable[[Cluster, Workload], PlanRequest]) -> Table:
    asked = llama(Cluster.from_yaml(FILE.read_text(encoding="utf-8")), WORKLOAD)
    request = replace(asked, solver="pipeline")  # times of a lone batch, as HexGen's
    pricer = Pricer(request)
    shown = Table(
        title="case study: Llama-2-70B, 16 bits, one request of 128 + 64 tokens; times of the paper's own layout",
        title_justify="left",
    )
    for column in ("layout", "layers", "seconds, predicted", "times", "paper"):
        shown.add_column(column)
    cases = _cases(request)
    paper = next(case for case in cases if case.layers == (48, 20, 12))
    own = _seconds(pricer, paper)
    for case in cases:
        short = _short_bytes(pricer, case)
        layers = "/".join(map(str, case.layers))
        if short > 0:
            shown.add_row(case.name, layers, f"out of memory by {short / 1e9:.1f} GB on a device", "", case.paper)
            continue
        seconds = _seconds(pricer, case)
        shown.add_row(case.name, layers, f"{seconds:.1f}", f"{seconds / own:.1f}", case.paper)
    return shown


def _cases(request: PlanRequest) -> list[Case]:
    devices = {name: [each for each in request.cluster.accelerators() if each.node == name] for name in "abc"}
    a, b, c = (DeviceGroup(tuple(devices[name])) for name in "abc")
    every = [
        *devices["c"],
        *devices["b"],
        *devices["a"],
    ]  # the smallest leads a group of unlike devices: they wait for it
    alone = tuple(DeviceGroup((each,)) for each in (*devices["a"], *devices["b"], *devices["c"]))
    near = nearly_solved(request, (a, b, c), 1)
    ours = proven(request, near, Effort.of(request.time_limit_seconds))[0] if near is not None else None
    return [
        Case("HexGen's, TP 4/2/2", (a, b, c), (48, 20, 12), "1"),
        Case("ours on all three, TP 4/2/2", (a, b, c), ours.layers if ours is not None else (), ""),
        Case("ours, the A6000 alone, TP 4", (a,), (80,), ""),
        Case("PP 8, in proportion to memory", alone, _proportional(alone, 80), "2x slower"),
        Case("PP 2 x TP 4", (a, _joined(devices["c"], devices["b"])), (56, 24), "19x slower"),
        Case("TP 8", (_joined(every),), (80,), "out of memory"),
        Case("PP 8, even", alone, (10,) * 8, "out of memory"),
    ]


def _joined(*parts: Sequence[Accelerator]) -> DeviceGroup:
    return DeviceGroup(tuple(each for part in parts for each in part))


def _proportional(order: Order, layers: int) -> tuple[int, ...]:
    sizes = [group.usable_bytes for group in order]
    shares = [int(layers * size / sum(sizes)) for size in sizes]
    shares[0] += layers - sum(shares)
    return tuple(shares)


def _short_bytes(pricer: Pricer, case: Case) -> int:
    """What the fullest device lacks."""
    problem = pricer.problem(Candidate(case.order, Pair(1, 1)))
    return -min(problem.free_bytes(_counts(case), place) for place in range(len(case.order)))


def _seconds(pricer: Pricer, case: Case) -> float:
    return pricer.problem(Candidate(case.order, Pair(1, 1))).latency_seconds(_counts(case))


def _counts(case: Case) -> dict[tuple[int, int, int], int]:
    return {(0, place, BITS): count for place, count in enumerate(case.layers)}
