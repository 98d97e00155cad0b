"""Plans of random mixed fleets against the best that any method finds, and against their own alternatives.

`python -m benchmarks.fleets [--json FILE] [--fleets 100] [--seconds 30] [--jobs 1] [--only NUMBER]`. First comes the fleet of
`examples/clusters/mixed-17.yaml` (`--only -1` for it alone), which has rows of its own. Costs are rooflines over datasheets with the
catalogue's efficiencies; every rate is **predicted**. The best known of a fleet is the best of all that is planned here: longer searches
from several seeds for `--seconds`, the solvers `layout`, `pipeline` and, of few devices, `exact`, alternatives, and the fleet under other names. Beside it each plan's
prediction is held against the simulator's closed loop, replica by replica, with the requests in flight that it was planned for.
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.rows import Row, run
from strata_operator.commands.inputs import read_question
from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.plan import Plan
from strata_planner.costs.latency import Latencies
from strata_planner.errors import InfeasibleError, PlannerError
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.model import Model
from strata_planner.question.request import GoalName, Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts.search import Wish, best_layout
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from strata_planner.simulate import fleet, of_clients, simulate

SEED = 12
EXAMPLES = Path(__file__).parent.parent / "examples"
MODELS = EXAMPLES / "models"
THE_FLEET = -1
# Which models people put on how many GiB, by the memory of the whole fleet.
SIZES = {
    "llama-3.1-8b": 12, "llama-2-13b": 20, "opt-30b": 40, "llama-3.1-70b": 60, "opt-66b": 60, "bloom-176b": 150,
    "qwen3-235b-a22b-fp8": 260,
}  # fmt: skip
POSITIONS = {"opt-30b": 2048, "opt-66b": 2048, "bloom-176b": 2048, "llama-2-13b": 4096}
LOADS = {"chat": (512, 256), "summarise": (4096, 256), "agent": (2048, 64)}
# An hour of each on public clouds and rental markets, about; only their ratios matter here.
PRICES = {
    "T4": 0.35, "L4": 0.7, "A10G": 1.0, "V100-16GB": 0.9, "V100-32GB": 1.2, "RTX-3090": 0.4, "RTX-4090": 0.6, "RTX-A6000": 0.8,
    "L40S": 1.6, "A100-40GB": 1.8, "A100-80GB": 2.4, "H100": 4.0,
    "RTX-5070": 0.35, "RTX-5090": 0.9, "H200": 5.0, "B200": 8.0, "MI300X": 4.0,
}  # fmt: skip
NETWORKS = (LinkRate(10, 0.1), LinkRate(25, 0.05), LinkRate(100, 0.02))
SAME = 1e-6  # values that are apart by less are the same plan's
FEW = 8  # devices at most that `exact` is asked for
NAMED_AGAIN = 2  # times that a fleet is planned under other names
WAVES = 3  # requests that are simulated of each client
FEWEST = 64  # requests: few of few clients would tell chance alone


@dataclass(frozen=True)
class Fleet:
    number: int
    model: str
    load: str
    request: PlanRequest

    def __str__(self) -> str:
        nodes = ", ".join(
            " + ".join(f"{device.count} {device.type}" for device in node.devices)
            for node in self.request.cluster.nodes
        )
        asked = self.request
        return (
            f"{self.number}: {self.model}, {self.load} x {asked.workload.concurrency}, {asked.objective.goal}, "
            f"{'/'.join(map(str, asked.allowed_bits))} bits: {nodes}"
        )


def the_fleet() -> Fleet:
    """What people have: `examples/llama-3.1-70b-mixed.yaml`, a pool of four types."""
    question = read_question(
        EXAMPLES / "llama-3.1-70b-mixed.yaml", EXAMPLES / "clusters/mixed-17.yaml", measure=False, shapes_only=True
    )
    return Fleet(THE_FLEET, "llama-3.1-70b", "2048 + 256", question.request)


def fleets(count: int) -> Iterator[Fleet]:
    """2 to 64 devices of 2 to 6 types on 1 to 16 nodes; every goal in turn."""
    draw, number = random.Random(SEED), 0
    while number < count:
        cluster = _a_cluster(draw)
        memory = sum(each.usable_bytes for each in cluster.accelerators()) >> 30
        load = draw.choice([*LOADS])
        fitting = [
            name for name, least in SIZES.items() if memory > least and sum(LOADS[load]) < POSITIONS.get(name, 8192)
        ]
        if not fitting:
            continue
        model = draw.choice(fitting)
        goal = ("throughput", "latency", "throughput", "slo", "throughput", "cost")[number % 6]
        prompt, answer = LOADS[load]
        yield Fleet(number, model, load, _a_request(draw, cluster, model, (prompt, answer), goal))  # type: ignore[arg-type]
        number += 1


def _a_cluster(draw: random.Random) -> Cluster:
    types = draw.sample([*PRICES], draw.randint(2, 6))
    nodes: list[Node] = []
    left = draw.choice([2, 4, 8, 16, 24, 32, 64])
    while left > 0 and len(nodes) < 16:
        held = draw.sample(types, 2 if draw.random() < 0.2 else 1)
        devices = []
        for each in held:
            count = min(left, draw.choice([1, 2, 4, 8]))
            if count:
                devices.append(Device(each, count, hourly_cost=PRICES[each]))
                left -= count
        nodes.append(Node(f"node-{len(nodes):02}", tuple(devices)))
    return Cluster(tuple(nodes), default_link=draw.choice(NETWORKS))


def _a_request(
    draw: random.Random, cluster: Cluster, model: str, lengths: tuple[int, int], goal: GoalName
) -> PlanRequest:
    prompt, answer = lengths
    devices = len(cluster.accelerators())
    concurrency = draw.choice([1, 4, 16, 4 * devices, 16 * devices])
    deadline, rate = (60.0, concurrency / 60.0) if goal == "slo" else (None, None)
    loaded = Model.from_folder(MODELS / model, for_serving=False)
    return PlanRequest(
        deployment="fleet",
        model_uri=f"file:///models/{model}",
        model=loaded,
        cluster=cluster,
        workload=Workload(prompt_tokens=prompt, output_tokens=answer, concurrency=concurrency),
        max_model_len=min(loaded.max_positions or prompt + answer, 8192),
        allowed_bits=draw.choice([(3, 4, 8, 16), (4, 8, 16), (8,), (16,)]),
        compute_type="float16",
        objective=Objective(goal, deadline, rate),
    )


@dataclass
class Judged:
    """`values`: by way of planning, more is better; `first`: seconds until a plan within 10 % of the best known."""

    fleet: Fleet
    value: float
    seconds: float
    plan: Plan
    values: dict[str, float] = field(default_factory=dict)
    first: float = 0.0
    cut: bool = False
    over_simulated: float = 1.0  # tokens/s, predicted over simulated
    first_token_over_simulated: float = 1.0

    @property
    def best(self) -> float:
        return max([self.value, *self.values.values()])

    @property
    def gap(self) -> float:
        """As a share of the best known."""
        return (self.best - self.value) / abs(self.best) if self.best else 0.0

    @property
    def beaten_by(self) -> list[str]:
        return [
            name
            for name, value in self.values.items()
            if name != "search" and value - self.value > SAME * abs(self.value)
        ]


def judge(fleet: Fleet, seconds: float) -> Judged | None:
    """None where nothing holds the model."""
    request = replace(fleet.request, time_limit_seconds=5.0)
    try:
        started = time.monotonic()
        outcome = make_plan(request)
        took = time.monotonic() - started
    except InfeasibleError:
        return None
    told = with_alternatives(request, outcome)  # one that is better becomes the plan
    shown = told.plan
    judged = Judged(fleet, value_of_plan(request, shown), took, shown, cut="cut" in " ".join(outcome.notes))
    judged.values["alternatives"] = max(
        (each.objective for each in shown.alternatives if each.objective is not None), default=-float("inf")
    )
    few = len(request.cluster.accelerators()) <= FEW
    for solver in ("layout", "pipeline", *(("exact",) if few else ())):
        judged.values[solver] = _planned(replace(request, solver=solver, time_limit_seconds=10.0), request)
    judged.values["longer"] = _planned(replace(request, time_limit_seconds=30.0))
    draw = random.Random(fleet.number)
    for each in range(NAMED_AGAIN):
        judged.values[f"renamed {each}"] = _planned(replace(request, cluster=_renamed(request.cluster, draw)))
    judged.values["search"] = _long(request, seconds)
    trace = outcome.improvements
    enough = judged.best - 0.1 * abs(judged.best)
    rate, first_token = simulated(request, shown)
    judged.over_simulated = shown.prediction.tokens_per_second / rate
    judged.first_token_over_simulated = shown.prediction.ttft_ms / 1e3 / first_token
    in_the_end = took if value_of_plan(request, outcome.plan) >= enough else float("inf")
    judged.first = next((at for at, value in trace if value >= enough), in_the_end)
    return judged


def simulated(request: PlanRequest, plan: Plan) -> tuple[float, float]:
    """Tokens a second of closed loops, one for each replica, and seconds to the first token in the mean; alike replicas do alike."""
    load, known = request.workload, dict[tuple[object, ...], tuple[float, float]]()
    models = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    total = waited = 0.0
    for replica, model in zip(plan.replicas, models, strict=True):
        stages = tuple((stage.devices[0].type, stage.layers, stage.bits) for stage in replica.stages)
        clients = replica.concurrency
        key = (stages, clients, replica.micro_batch)
        if key not in known:
            lengths, count = (load.prompt_tokens, load.output_tokens), max(WAVES * clients, FEWEST) + 8
            trace = of_clients(clients, count, *lengths, SEED, model.limits.most_tokens)
            outcome = simulate([model], trace, in_flight=clients)
            first = statistics.mean(each.ttft_seconds or 0.0 for each in outcome.requests[clients:])
            known[key] = outcome.steady_tokens_per_second(clients), first
        total, waited = total + known[key][0], waited + clients * known[key][1]
    return total, waited / sum(replica.concurrency for replica in plan.replicas)


def _planned(request: PlanRequest, asked: PlanRequest | None = None) -> float:
    """By the number of what was asked, which is another one than a single pipeline's; minus infinity where there is none."""
    try:
        return value_of_plan(asked or request, make_plan(request).plan)
    except PlannerError:
        return -float("inf")


def _renamed(cluster: Cluster, draw: random.Random) -> Cluster:
    names = [f"n{number}" for number in draw.sample(range(1000), len(cluster.nodes))]
    nodes = [msgspec.structs.replace(node, name=name) for node, name in zip(cluster.nodes, names, strict=True)]
    draw.shuffle(nodes)
    return msgspec.structs.replace(cluster, nodes=tuple(nodes))


def _long(request: PlanRequest, seconds: float) -> float:
    """Searches from one seed after the other, each many times as patient as a plan's, and with no limit of work."""
    best, seed, latest = -float("inf"), 1, time.monotonic() + seconds
    while time.monotonic() < latest:
        left = latest - time.monotonic()
        try:
            found = best_layout(request, Wish(seconds=left, seed=seed, stall=8000, work=math.inf))
        except InfeasibleError:
            return best
        best, seed = max(best, found.value(request)), seed + 1
    return best


def measure(count: int, seconds: float, only: int | None, jobs: int) -> list[Row]:
    chosen = [fleet for fleet in (the_fleet(), *fleets(count)) if only is None or fleet.number == only]
    with ProcessPoolExecutor(jobs) as pool:
        judging = pool.map(judge, chosen, [seconds] * len(chosen))
        found = list(track(judging, "fleets", len(chosen), console=Console(stderr=True)))
    known = [each for each in found if each is not None]
    own = [row for each in known if each.fleet.number == THE_FLEET for row in _rows_of_the_fleet(each)]
    judged = [each for each in known if each.fleet.number != THE_FLEET]
    _show(sorted(known, key=lambda each: -each.gap)[:20])
    return own + (_rows(judged) if judged else [])


def _rows_of_the_fleet(judged: Judged) -> list[Row]:
    asked, plan = judged.fleet.request, judged.plan
    return [
        Row("the_fleet", judged.value, "tokens/s", "best known", judged.best),
        Row("the_fleet_gap", judged.gap, "of the best known", goal=0.01, lower_is_better=True),
        Row("the_fleet_seconds", judged.seconds, "s for the plan", goal=5.0, lower_is_better=True),
        Row("the_fleet_first", judged.first, "s to a plan within 10 %", goal=2.0, lower_is_better=True),
        Row(
            "the_fleet_beaten", len(judged.beaten_by), "times that another way was better", goal=0, lower_is_better=True
        ),
        Row("the_fleet_unused", len({each.place for each in asked.cluster.accelerators()} - plan.places), "devices"),
        Row("the_fleet_over_simulated", judged.over_simulated, "tokens/s, predicted over simulated"),
    ]


def _rows(judged: Sequence[Judged]) -> list[Row]:
    gaps = [each.gap for each in judged]
    firsts = [each.first for each in judged]
    beaten = [(each, name) for each in judged for name in each.beaten_by]
    worst = max(judged, key=lambda each: each.gap)
    return [
        Row(
            "mixed_gap_mean",
            statistics.mean(gaps),
            f"of the best known of {len(judged)} fleets",
            goal=0.01,
            lower_is_better=True,
        ),
        Row("mixed_gap_worst", worst.gap, f"fleet {worst.fleet.number}", goal=0.05, lower_is_better=True),
        Row("mixed_first_mean", statistics.mean(firsts), "s to a plan within 10 %", goal=0.5, lower_is_better=True),
        Row("mixed_first_worst", max(firsts), "s", goal=2.0, lower_is_better=True),
        Row("plan_seconds_mean", statistics.mean(each.seconds for each in judged), "s for a plan"),
        Row("plan_seconds_worst", max(each.seconds for each in judged), "s"),
        Row("cut_by_the_clock", sum(each.cut for each in judged), "plans cut at 5 s"),
        Row(
            "predicted_over_simulated",
            statistics.mean(abs(each.over_simulated - 1) for each in judged),
            "mean distance of predicted tokens/s from a simulated closed loop's",
            goal=0.1,
            lower_is_better=True,
        ),
        Row(
            "predicted_over_simulated_worst",
            max(abs(each.over_simulated - 1) for each in judged),
            f"fleet {max(judged, key=lambda each: abs(each.over_simulated - 1)).fleet.number}",
            goal=0.25,
            lower_is_better=True,
        ),
        Row(
            "first_token_over_simulated",
            statistics.mean(each.first_token_over_simulated for each in judged),
            "predicted time to the first token over a simulated closed loop's, in the mean",
        ),
        Row(
            "first_token_over_simulated_worst",
            max((each.first_token_over_simulated for each in judged), key=lambda ratio: abs(math.log(ratio))),
            "the ratio that is furthest from one",
        ),
        Row("never_beaten", len(beaten), "times that another way was better", goal=0, lower_is_better=True),
        *(
            Row(f"beaten_by_{name}", sum(name == each for _, each in beaten), "plans")
            for name in sorted({each for _, each in beaten})
        ),
    ]


def _show(worst: Sequence[Judged]) -> None:
    table = Table(title="the worst fleets", title_justify="left")
    for name in ("fleet", "value", "best known", "gap", "seconds", "beaten by"):
        table.add_column(name, overflow="fold")
    for each in worst:
        best = max(each.values, key=lambda name: each.values[name])
        table.add_row(
            str(each.fleet),
            f"{each.value:.4g}",
            f"{each.best:.4g} ({best})",
            f"{each.gap:.1%}",
            f"{each.seconds:.2f}",
            ", ".join(each.beaten_by),
        )
    Console(width=200).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--fleets", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=1, help="fleets at a time, a core each")
    parser.add_argument("--only", type=int, default=None)
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("fleets", lambda: measure(chosen.fleets, chosen.seconds, chosen.only, chosen.jobs), rest)


if __name__ == "__main__":
    main()
