"""Layouts of HexGen's pool and case study, of a fleet of 1,000 GPUs, and of Helix's cluster beside what those papers print.

`python -m benchmarks.layouts [--json FILE] [--data DIR] [--quick]`, some 2 minutes; `--quick` simulates a quarter of the requests.
Costs are rooflines over datasheets with the catalogue's efficiencies, but for Helix's cluster, whose per-layer tables (Helix
artifact) are read from `--data`. Rates and attainments are simulated or predicted, never measured.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.helix import helix_table_of
from benchmarks.hexgen_case import case_table
from benchmarks.rows import Row, run
from benchmarks.shared_data import data_folder
from strata_planner.costs.latency import Latencies
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts.bound import most_tokens_per_second
from strata_planner.search.layouts.fleet import FleetLayout, fleet_layout
from strata_planner.search.layouts.genetic import Genome
from strata_planner.search.layouts.goals import Deadlines, Goal
from strata_planner.search.layouts.pool import Pool
from strata_planner.search.layouts.search import (
    Layout,
    Wish,
    best_layout,
    composition_of,
    laid,
    layout_plan,
    replan_layout,
)
from strata_planner.simulate import fleet, poisson, simulate

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKLOAD = Workload(prompt_tokens=32, output_tokens=128, concurrency=3072)  # about all that the pool's memory holds
# Table 4 of HexGen: each replica's devices by node, and the tensor-parallel degrees of its stages.
TABLE_4: tuple[tuple[dict[str, int], tuple[int, ...]], ...] = (
    ({"iceland-a": 8}, (4, 4)),
    ({"iceland-b": 8}, (4, 4)),
    ({"norway-a": 3, "norway-b": 3}, (2, 1, 1, 2)),
    ({"nevada-a": 8}, (4, 4)),
    ({"illinois-a": 3}, (2, 1)),
    ({"illinois-a": 3}, (2, 1)),
    ({"illinois-b": 3}, (2, 1)),
    ({"illinois-b": 3}, (2, 1)),
    ({"illinois-a": 2, "illinois-c": 2}, (2, 2)),
    ({"illinois-b": 2, "illinois-c": 2}, (2, 2)),
    ({"illinois-d": 2, "illinois-c": 2}, (2, 2)),
    ({"illinois-d": 2, "illinois-c": 2}, (2, 2)),
)
# Of the deadline, times what a lone request takes on Table 4's layout.
SCALES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
LOADS = (0.1, 0.25, 0.5, 0.75, 0.9)  # of what Table 4's layout is predicted to do
SEED, SECONDS = 11, 90.0  # of arrivals
LEAVING = ("illinois-a", "illinois-b", "iceland-a", "nevada-a")
FLEET = (
    ("A100-80GB", 15, 8),
    ("A100-40GB", 20, 8),
    ("L40S", 40, 4),
    ("A10G", 50, 4),
    ("V100-32GB", 20, 8),
    ("T4", 50, 4),
)
FLEET_SEQUENCES = 200_000


def llama(cluster: Cluster, workload: Workload, **changes: object) -> PlanRequest:
    request = PlanRequest(
        deployment="paper",
        model_uri="file:///models/llama-2-70b",
        model=Model.from_folder(EXAMPLES / "models" / "llama-2-70b", for_serving=False),
        cluster=cluster,
        workload=workload,
        max_model_len=workload.sequence_tokens,
        allowed_bits=(16,),
        theta=0.0,
        compute_type="float16",
        tensor_parallel=(1, 2, 4, 8),
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def pool_request() -> PlanRequest:
    text = (EXAMPLES / "clusters" / "hexgen-58.yaml").read_text(encoding="utf-8")
    return llama(Cluster.from_yaml(text), WORKLOAD)


def table_4(request: PlanRequest, goal: Goal) -> Layout:
    """Its groupings and degrees; layers and micro-batches are decided by our solver, which can only help it."""
    pool = Pool(request.cluster)
    genome: Genome = tuple(composition_of(pool, counts) for counts, _ in TABLE_4)
    return laid(request, genome, Wish(goal=goal), degrees=tuple(degrees for _, degrees in TABLE_4))


@dataclass(frozen=True)
class Attainment:
    """Shares of requests in time, by load and scale."""

    scales: dict[float, tuple[float, ...]]

    @property
    def mean(self) -> float:
        values = [value for row in self.scales.values() for value in row]
        return sum(values) / len(values)


def attained(request: PlanRequest, layout: Layout, base: float, rates: Sequence[float], seconds: float) -> Attainment:
    replicas = fleet(layout_plan(layout), request.model, request.cluster, Latencies())
    found = {}
    for load, rate in zip(LOADS, rates, strict=True):
        trace = poisson(rate, round(rate * seconds), WORKLOAD.prompt_tokens, WORKLOAD.output_tokens, SEED)
        outcome = simulate(replicas, trace)
        found[load] = tuple(outcome.attainment_of_latency(scale * base) for scale in SCALES)
    return Attainment(found)


def lone_seconds(request: PlanRequest, layout: Layout) -> float:
    """Of a request that has the whole layout to itself."""
    replicas = fleet(layout_plan(layout), request.model, request.cluster, Latencies())
    outcome = simulate(replicas, poisson(1e-3, 2 * len(replicas), WORKLOAD.prompt_tokens, WORKLOAD.output_tokens, SEED))
    return outcome.mean("latency") or 0.0


def hexgen_rows(console: Console, seconds: float) -> list[Row]:
    request = pool_request()
    theirs = table_4(request, Goal())
    base = lone_seconds(request, theirs)
    rates = [load * theirs.tokens_per_second / WORKLOAD.output_tokens for load in LOADS]
    goal = Goal("slo", Deadlines(tuple(scale * base for scale in SCALES), tuple(rates)))
    theirs = table_4(request, goal)
    ours = best_layout(request, Wish(goal=goal))
    quickest = best_layout(request, Wish())
    for title, layout in (("HexGen, Table 4", theirs), ("ours, for deadlines", ours), ("ours, for tokens/s", quickest)):
        console.print(groupings(title, layout))
    replanned, spent = after_four_leave(request, ours, goal)
    console.print(groupings("ours, after 4 GPUs left", replanned))
    bound = most_tokens_per_second(request)
    attainments = [attained(request, layout, base, rates, seconds) for layout in (ours, theirs)]
    console.print(attainment_table(base, rates, *attainments))
    return [
        Row("hexgen_seconds", ours.stats.seconds, "s", "HexGen, as published", 126.0, goal=5.0, lower_is_better=True),
        Row("hexgen_replan_seconds", spent, "s", "HexGen, as published", 30.0, goal=1.0, lower_is_better=True),
        Row(
            "hexgen_attainment",
            attainments[0].mean,
            "share in time, simulated",
            "HexGen's Table 4, same simulator and trace",
            attainments[1].mean,
            ratio=attainments[0].mean / attainments[1].mean,
            goal=1.0,
        ),
        Row("hexgen_gap", 1 - quickest.tokens_per_second / bound, "of the bound", "bound, tokens/s", bound),
    ]


def after_four_leave(request: PlanRequest, running: Layout, goal: Goal) -> tuple[Layout, float]:
    """A GPU of each of four machines is gone, so that four replicas or more are broken; seconds that the new layout takes."""
    nodes = tuple(
        msgspec.structs.replace(
            node, devices=tuple(msgspec.structs.replace(each, count=each.count - 1) for each in node.devices)
        )
        if node.name in LEAVING
        else node
        for node in request.cluster.nodes
    )
    smaller = replace(request, cluster=msgspec.structs.replace(request.cluster, nodes=nodes))
    layout = replan_layout(smaller, running, Wish(goal=goal, seconds=0.8))
    return layout, layout.stats.seconds


def groupings(title: str, layout: Layout) -> Table:
    shown = Table(
        title=f"{title}: {len(layout.replicas)} replicas, {layout.idle} devices idle, {layout.tokens_per_second:,.0f} tokens/s predicted, "
        f"{layout.stats.evaluations} pipelines in {layout.stats.seconds:.2f} s",
        title_justify="left",
    )
    for column in ("replica", "stages", "degrees", "layers"):
        shown.add_column(column)
    for column in ("sequences", "tokens/s", "s per request"):
        shown.add_column(column, justify="right")
    for number, each in enumerate(layout.replicas):
        told = each.prediction
        seconds = (told.ttft_ms + (WORKLOAD.output_tokens - 1) * told.tpot_ms) / 1e3
        shown.add_row(
            str(number),
            ", ".join(map(str, each.order)),
            "/".join(str(group.degree) for group in each.order),
            "/".join(map(str, each.layers)),
            str(each.concurrency),
            f"{told.tokens_per_second:,.0f}",
            f"{seconds:.1f}",
        )
    return shown


def attainment_table(base: float, rates: Sequence[float], ours: Attainment, theirs: Attainment) -> Table:
    shown = Table(title=f"share of requests in time, ours | Table 4 (scale 1 = {base:.1f} s)", title_justify="left")
    shown.add_column("requests/s", justify="right")
    for scale in SCALES:
        shown.add_column(f"{scale:g}", justify="right")
    for rate, load in zip(rates, LOADS, strict=True):
        pairs = zip(ours.scales[load], theirs.scales[load], strict=True)
        shown.add_row(f"{rate:.1f}", *(f"{one:.2f} | {other:.2f}" for one, other in pairs))
    return shown


def fleet_cluster() -> Cluster:
    nodes = (
        Node(f"{kind.lower()}-{number}", (Device(kind, count=size),))
        for kind, count, size in FLEET
        for number in range(count)
    )
    return Cluster(tuple(nodes), default_link=LinkRate(gbps=25, latency_ms=0.1))


def fleet_rows(console: Console) -> list[Row]:
    layout = fleet_layout(llama(fleet_cluster(), replace_concurrency(FLEET_SEQUENCES)))
    console.print(fleet_table(layout))
    return [
        Row("fleet_1000_seconds", layout.seconds, "s", goal=10.0, lower_is_better=True),
        Row(
            "fleet_1000_gap",
            layout.gap,
            "of the bound",
            "bound, tokens/s",
            layout.bound,
            goal=0.15,
            lower_is_better=True,
        ),
    ]


def replace_concurrency(sequences: int) -> Workload:
    return msgspec.structs.replace(WORKLOAD, concurrency=sequences)


def fleet_table(layout: FleetLayout) -> Table:
    shown = Table(
        title=f"1,000 GPUs of 6 types, {FLEET_SEQUENCES:,} sequences: {layout.tokens_per_second:,.0f} tokens/s predicted of at most "
        f"{layout.bound:,.0f}, {layout.idle} devices idle",
        title_justify="left",
    )
    for column in ("replicas", "nodes", "degrees", "layers", "sequences", "tokens/s each"):
        shown.add_column(column)
    for count, each in layout.kinds:
        nodes = ", ".join(dict.fromkeys(group.leader.type for group in each.order))
        shown.add_row(
            str(count),
            f"{sum(group.degree for group in each.order)} x {nodes}",
            _runs([group.degree for group in each.order]),
            _runs(each.layers),
            str(each.concurrency),
            f"{each.prediction.tokens_per_second:,.0f}",
        )
    return shown


def _runs(values: Sequence[int]) -> str:
    """Equal neighbours together: 8 x 10."""
    parts: list[list[int]] = []
    for value in values:
        if parts and parts[-1][1] == value:
            parts[-1][0] += 1
        else:
            parts.append([1, value])
    return ", ".join(f"{count} x {value}" if count > 1 else str(value) for count, value in parts)


def measure(data: Path | None, *, quick: bool) -> list[Row]:
    console = Console(width=150)
    rows = hexgen_rows(console, SECONDS / 4 if quick else SECONDS)
    console.print(case_table(llama))
    rows += fleet_rows(console)
    if data is None:
        console.print("helix_decode is left out: name the folder of the published tables with --data")
        return rows
    table, row = helix_table_of(llama, data)
    console.print(table)
    return [*rows, row]


if __name__ == "__main__":
    folder, rest = data_folder()
    run("layouts", lambda: measure(folder, quick="--quick" in sys.argv), [each for each in rest if each != "--quick"])
