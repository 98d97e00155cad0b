"""Repairs of lost nodes: milliseconds, what is kept beside a fresh plan, and the takeover of a 70B model term by term.

`python -m benchmarks.repair [--json FILE] [--losses 50] [--seconds 4] [--no-fresh]`. Mixed fleets of several types that serve Llama 3.1 70B; every rate is
**predicted** (rooflines over datasheets), the milliseconds of repairs are measured here, each in a fresh request, the best of three. The gap is
of the repair to a plan from scratch with the running one as a hint, searched for `--seconds`. The takeover is computed: bytes and layers of the
repair, times measured load and switch rates (docs/benchmarks.md), and KV that is computed again by the plan's own prediction; this machine has none of its devices.
It is told twice, with every layer read from files, and with what slots keep in host memory, which goes to the device from where it lies.
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row, run
from strata_operator.decide.comeback import SWITCH_SECONDS
from strata_planner.answer.shadows import shadow_table
from strata_planner.contract.plan import Plan
from strata_planner.contract.rates import PORT_BYTES_PER_SECOND, READ_BYTES_PER_SECOND
from strata_planner.errors import PlannerError
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.repair import Repair, Takeover, narrow_seconds, repair
from strata_planner.replan.shadows import with_shadows
from strata_planner.replan.steps import Narrow
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from strata_runtime.wire.transport import HEARTBEAT_MILLISECONDS, SILENCE_MILLISECONDS

MODEL = Path(__file__).parent.parent / "examples" / "models" / "llama-3.1-70b"
SEED = 16
GOAL_MS = {8: 10.0, 64: 50.0}
TAKEOVER_GOAL_SECONDS = 5.0
SHADOW_BYTES = (
    40 << 30
)  # of host memory on each slot, at most. A100s need 37 GiB: machines that are rented with one have 85; L4s 3

# Nodes of one device each, so that a node's loss is a stage's: three types on 8, four on 64 devices.
EIGHT = {"A100-40GB": 3, "L4": 4, "A10G": 1}
SIXTY_FOUR = {"A100-40GB": 12, "L40S": 8, "A10G": 20, "L4": 24}
PAPER = {"A100-40GB": 3, "L4": 4}

NOTICE_SECONDS = (SILENCE_MILLISECONDS + HEARTBEAT_MILLISECONDS) / 1000  # silence of an authenticated peer, at most


def cluster_of(types: dict[str, int]) -> Cluster:
    nodes = [Node(f"{name.lower()}-{k:02}", (Device(name, 1),)) for name, count in types.items() for k in range(count)]
    return Cluster(tuple(nodes), default_link=LinkRate(25, 0.05))


def request_on(cluster: Cluster, concurrency: int, seconds: float, most_replicas: int | None = None) -> PlanRequest:
    return PlanRequest(
        deployment="fleet",
        model_uri="file:///models/llama-3.1-70b",
        model=Model.from_folder(MODEL, for_serving=False),
        cluster=cluster,
        workload=Workload(prompt_tokens=512, output_tokens=256, concurrency=concurrency),
        max_model_len=4096,
        compute_type="float16",
        method="anyPrecision",
        allowed_bits=(3, 4, 5, 6, 7, 8, 16),
        max_replicas=most_replicas,
        time_limit_seconds=seconds,
    )


def without(request: PlanRequest, *nodes: str) -> PlanRequest:
    return replace(request, cluster=request.cluster.without(nodes))


@dataclass(frozen=True)
class Loss:
    node: str
    milliseconds: float
    repair: Repair | None
    gap: float | None  # against a fresh plan; None: there is no repair, or no plan


def timed(request: PlanRequest, running: Plan) -> tuple[Repair | None, float]:
    """Of a request that has remembered nothing; the best of three."""
    found, best = None, float("inf")
    for _ in range(3):
        asked = replace(request, cluster=request.cluster.restricted_to({n.name for n in request.cluster.nodes}))
        started = time.perf_counter()
        try:
            found = repair(asked, running)
        except PlannerError:
            found = None
        best = min(best, 1e3 * (time.perf_counter() - started))
    return found, best


def losses_of(request: PlanRequest, running: Plan, count: int, *, fresh: bool) -> list[Loss]:
    draw, used = random.Random(SEED), sorted({stage.node for stage in running.stages})
    found, values = list[Loss](), dict[str, float]()
    for node in (draw.choice(used) for _ in range(count)):
        after = without(request, node)
        mended, milliseconds = timed(after, running)
        gap = None
        if fresh and mended is not None:
            if node not in values:
                values[node] = value_of_plan(after, make_plan(after, (running,)).plan)
            gap = mended.loss_against(values[node])
        found.append(Loss(node, milliseconds, mended, gap))
    return found


def shown(title: str, running: Plan, losses: Sequence[Loss]) -> Table:
    table = Table(
        title=f"{title}: {running.prediction.tokens_per_second:.0f} tokens/s before, {len(running.stages)} stages"
    )
    for name in ("lost", "ms", "repair", "tokens/s", "gap to a fresh plan", "layers moved", "layers lowered"):
        table.add_column(name)
    for each in losses:
        mended = each.repair
        if mended is None:
            table.add_row(each.node, f"{each.milliseconds:.1f}", "none")
            continue
        gap = "-" if each.gap is None else f"{each.gap:.1%}"
        rate, moved = f"{mended.plan.prediction.tokens_per_second:.0f}", str(mended.movement.moved_layers)
        table.add_row(each.node, f"{each.milliseconds:.1f}", mended.kind, rate, gap, moved, str(len(mended.lowered)))
    return table


def rows_of(size: int, losses: Sequence[Loss]) -> list[Row]:
    milliseconds = [each.milliseconds for each in losses]
    gaps = [each.gap for each in losses if each.gap is not None]
    goal = GOAL_MS[size]
    rows = [Row(f"repair_ms_{size}", statistics.median(milliseconds), "ms", goal=goal, lower_is_better=True)]
    rows.append(Row(f"repair_ms_{size}_worst", max(milliseconds), "ms", goal=goal, lower_is_better=True))
    if gaps:
        rows.append(Row(f"repair_gap_{size}", statistics.mean(gaps), "share", lower_is_better=True))
        rows.append(Row(f"repair_gap_{size}_worst", max(gaps), "share", lower_is_better=True))
    return rows


@dataclass(frozen=True)
class Term:
    name: str
    amount: str
    seconds: float


def takeover_terms(request: PlanRequest, running: Plan, mended: Repair) -> list[Term]:
    """To the next token. Slots narrow and load side by side: the busiest one counts."""
    model = request.model
    most_bytes, most_layers = mended.busiest.loaded_bytes, mended.busiest.narrowed_layers
    most_read, of_a_layer = mended.busiest.read_bytes, narrow_seconds(model)
    moved, size = mended.movement.moved_layers, (mended.movement.loaded_bytes - mended.shadowed_bytes) / 1e9
    return [
        Term("notice", "silence of a peer, at most", NOTICE_SECONDS),
        Term("repair", "measured here", mended.seconds),
        Term(
            "drop planes in place",
            f"{sum(isinstance(each, Narrow) for each in mended.steps)} layers, {most_layers} on the busiest slot, {1e3 * of_a_layer:.0f} ms each",
            most_layers * of_a_layer,
        ),
        Term(
            "read",
            f"{moved} layers, {size:.1f} GB from files, {most_read / 1e9:.1f} GB on the busiest slot, {READ_BYTES_PER_SECOND / 1e9:.2f} GB/s",
            most_read / READ_BYTES_PER_SECOND,
        ),
        Term("take what is kept", f"{mended.shadowed_bytes / 1e9:.1f} GB, not copied in host memory", 0.0),
        Term(
            "to the device",
            f"{most_bytes / 1e9:.1f} GB on the busiest slot, {PORT_BYTES_PER_SECOND / 1e9:.0f} GB/s, assumed",
            most_bytes / PORT_BYTES_PER_SECOND,
        ),
        Term("prepare and commit, connections", "measured on processors (`elastic`)", SWITCH_SECONDS),
        refill_term(request.workload, running, mended.plan),
    ]


def refill_term(workload: Workload, running: Plan, mended: Plan) -> Term:
    """Lost KV of the one stream that goes on first, computed by who has its layers now, from what the stage before them kept (`boundaryLog`). All streams take the
    same each: the shortest goes on first, so that the mean one's tokens are an upper bound.
    """
    tokens = workload.prompt_tokens + workload.output_tokens // 2
    (before,), (after,) = running.replicas, mended.replicas
    steps = math.ceil(tokens / after.micro_batch.max_step_tokens)
    seconds, most = 0.0, 0
    for stage in after.stages:
        kept = [set(range(each.layers[0], each.layers[1] + 1)) for each in before.stages if each.slot == stage.slot]
        layers = set(range(stage.layers[0], stage.layers[1] + 1))
        new = len(layers.difference(*kept))
        seconds += steps * stage.times.prefill_seconds * new / len(layers)
        most = max(most, new)
    what = f"{tokens} tokens of a stream, {most} layers on the busiest slot, predicted; of all {workload.concurrency} {workload.concurrency * seconds:.1f} s"
    return Term("compute lost KV again", what, seconds)


def takeovers(console: Console, seconds: float) -> list[Row]:
    """The paper's fleet, a device lost: an L4, and an A100."""
    request = request_on(cluster_of(PAPER), 8, seconds, most_replicas=1)
    request = replace(request, min_stages=len(request.cluster.nodes))  # one pipeline over all, as the paper's
    running = make_plan(request).plan
    request = replace(request, min_stages=1)
    shadowed = with_shadows(request, running, Takeover(), SHADOW_BYTES).plan
    console.print(shadow_table(shadowed))
    return [
        Row(
            "llama70b_takeover",
            worst_takeover(console, request, shadowed),
            "s, computed, the worst device",
            peer="every layer read from files",
            peer_value=worst_takeover(console, request, running),
            goal=TAKEOVER_GOAL_SECONDS,
            lower_is_better=True,
        )
    ]


def worst_takeover(console: Console, request: PlanRequest, running: Plan) -> float:
    """Seconds, over all losses of one node."""
    worst = 0.0
    for node in sorted({stage.node for stage in running.stages}):
        mended, _ = timed(without(request, node), running)
        if mended is None:
            console.print(f"{node} lost: no repair")
            worst = float("inf")
            continue
        terms = takeover_terms(request, running, mended)
        how = "with shadows" if running.shadows else "from files"
        title = f"{node} lost, {how}: {mended.kind}, {len(mended.lowered)} layers lowered"
        table = Table(title=title, title_justify="left")
        for name in ("term", "of what", "seconds"):
            table.add_column(name)
        for each in terms:
            table.add_row(each.name, each.amount, f"{each.seconds:.3f}")
        total = sum(each.seconds for each in terms)
        table.add_row("all", "", f"{total:.2f}")
        console.print(table)
        worst = max(worst, total)
    return worst


def measure(losses: int, seconds: float, *, fresh: bool) -> list[Row]:
    console, rows = Console(width=150), list[Row]()
    for size, types, replicas in ((8, EIGHT, 1), (64, SIXTY_FOUR, None)):
        request = request_on(cluster_of(types), 2 * size, seconds, replicas)
        running = make_plan(replace(request, min_stages=4)).plan
        found = losses_of(replace(request, min_stages=1), running, losses, fresh=fresh)
        console.print(shown(f"{size} devices", running, found))
        rows += rows_of(size, found)
    return rows + takeovers(console, seconds)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.repair", description=__doc__)
    parser.add_argument("--losses", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each search")
    parser.add_argument("--no-fresh", action="store_true", help="only the repairs: no plan is searched for beside them")
    given, rest = parser.parse_known_args(arguments)
    run("repair", lambda: measure(given.losses, given.seconds, fresh=not given.no_fresh), rest)


if __name__ == "__main__":
    main(sys.argv[1:])
