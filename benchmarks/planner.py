"""The planner on LLM-PQ's 11 clusters: `python -m benchmarks.planner [--json FILE] [--quick] [--data DIR]`.

All device orders and micro-batch pairs of each cluster under the paper's default load (512 / 100 tokens, 32 sequences) with
seeded sensitivities in which every layer differs, theta from 0 to 1000. Then: small instances against trying everything, the
plain ILP on our order and pair and on ten seeded others, other methods and partitions, memory and import. Costs are the
roofline over the catalogue unless a row says otherwise; `--data` adds the LLM-PQ authors' measured layer times for clusters 3
and 9. Replicas, fleets and HexGen's pool follow (`benchmarks.layouts`, also a command of its own). Every plan of ours is priced by
`benchmarks.reference.judge`. Seconds are a processor's, so that a busy machine does not count; methods run on one core. About 12
minutes on two quiet cores, 2 with --quick.
"""

import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import layouts
from benchmarks.plan_clusters import LISTED, OTHERS, PaperCluster, request_for
from benchmarks.reference import baselines
from benchmarks.reference.judge import assignment_of, judge
from benchmarks.reference.published_tables import llmpq_tables
from benchmarks.rows import Row, run
from benchmarks.seeded_omegas import file_of
from benchmarks.shared_data import data_folder
from benchmarks.small_instances import best_objective, instances
from strata_planner.costs.tables import LayerTables, TableShape
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact import exact
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.orders import fleet_of, orders
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.problem import SolutionStatus
from strata_planner.search.exact.search import Search
from strata_planner.search.planning import PlanOutcome, make_plan
from strata_planner.search.prediction import predict
from strata_planner.sensitivity import Sensitivity

CLUSTERS = sorted((*LISTED, *OTHERS), key=lambda each: each.number)
THETAS = (0.0, 1.0, 10.0, 100.0, 1000.0)
THETA = 10.0  # of the comparison with other methods and with the ILP
PAPER_RATES = {1: (55.57, 13.69, 55.57), 2: (155.13, 103.76, 103.76), 3: (39.70, 21.86, 3.37), 4: (14.94, 7.12, 0.0)}
PAPER_RATES |= {5: (9.97, 4.26, 0.0), 6: (46.60, 27.82, 7.41), 7: (7.48, 4.38, 0.0), 8: (10.86, 3.77, 0.0)}
PAPER_RATES |= {9: (7.85, 3.06, 3.06), 10: (17.97, 17.54, 6.70), 11: (70.41, 65.14, 3.57)}
ROOFLINE = "roofline"
MEASURED_2023 = "LLM-PQ's layer times (kernels of 2023), else roofline"
_SEED, _OTHERS, _SMALL = 66, 10, 200
_ILP_SECONDS, _HEURISTIC_SECONDS = 60.0, 20.0
_NAMES_2023 = {"T4": ["T4"], "V100": ["V100-32GB"], "P100": ["P100-12GB"]}
_SAME = 1e-6
_TIE = 1e-3


@dataclass(frozen=True)
class Planned:
    cluster: PaperCluster
    request: PlanRequest
    outcome: PlanOutcome
    seconds: float

    @property
    def objective(self) -> float:
        return judge(self.request, assignment_of(self.outcome.plan, self.request)).objective


def asked(cluster: PaperCluster, theta: float, data: Path | None = None) -> PlanRequest:
    """The cluster's request with seeded sensitivities; with `data` also measured layer times."""
    request = replace(
        request_for(cluster), solver="pipeline", theta=theta, sensitivity=Sensitivity.from_file(file_of(cluster.model))
    )
    if data is None:
        return request
    shape = TableShape.of(request.model.layers[0])
    tables = LayerTables(llmpq_tables(data / "llmpq-layer-latency.csv", shape, _NAMES_2023))
    return replace(request, latency_sources=(tables,))


def plan(cluster: PaperCluster, request: PlanRequest, repeats: int) -> Planned:
    """The plan and the fewest seconds that a processor took for it, judged."""
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        outcome = make_plan(request)
        seconds.append(time.process_time() - started)
    planned = Planned(cluster, request, outcome, min(seconds))
    verdict = judge(request, assignment_of(outcome.plan, request))
    told = outcome.plan.prediction.latency_seconds + request.theta * outcome.plan.prediction.quality_penalty
    assert verdict.fits, f"cluster {cluster.number}: a plan beyond memory"
    assert math.isclose(verdict.objective, told, rel_tol=_SAME), (
        f"cluster {cluster.number}: {verdict.objective} != {told}"
    )
    return planned


def swept(console: Console, repeats: int) -> list[Planned]:
    """All clusters and thetas."""
    table = _table("ours: all orders and pairs", "cluster", "theta", "latency s", "quality s", "objective", "tokens/s")
    for column in ("gap", "seconds", "orders", "candidates", "paper's seconds"):
        table.add_column(column, justify="right")
    found = []
    for cluster in CLUSTERS:
        for theta in THETAS:
            planned = plan(cluster, asked(cluster, theta), repeats)
            told, stats = planned.outcome.plan.prediction, planned.outcome.stats
            table.add_row(
                f"{cluster.number} {cluster.model}",
                f"{theta:g}",
                f"{told.latency_seconds:.3f}",
                f"{theta * told.quality_penalty:.3f}",
                f"{planned.objective:.3f}",
                f"{told.tokens_per_second:.1f}",
                f"{stats.gap:.1e}",
                f"{planned.seconds:.2f}",
                f"{stats.orders}",
                f"{stats.candidates}",
                f"{cluster.paper_seconds:g}",
            )
            found.append(planned)
    console.print(table)
    return found


def small_share(number: int) -> float:
    """Of small instances: solved as trying everything does."""
    equal = 0
    for problem in instances(number, _SEED):
        best, solution = best_objective(problem), exact.solve(problem)
        if math.isinf(best):
            equal += solution.status is SolutionStatus.INFEASIBLE
        else:
            equal += bool(solution.counts) and math.isclose(solution.objective, best, rel_tol=1e-5, abs_tol=1e-9)
    return equal / number


def candidates_of(planned: Planned, number: int) -> list[Candidate]:
    """Ours first, then seeded others."""
    request = planned.request
    pricer, fleet = Pricer(request), fleet_of(request.cluster)
    every = [
        candidate
        for order in orders(fleet, range(1, fleet.size + 1))
        if sum(group.usable_bytes for group in order) >= pricer.least_weight_bytes
        for candidate in pricer.micro_batches(order)
    ]
    given = assignment_of(planned.outcome.plan, request)
    ours = Candidate(given.order, Pair(given.prefill, given.decode))
    others = random.Random(_SEED).sample(every, min(number, len(every)))
    return [ours, *others]


def ilp_objective(request: PlanRequest, candidate: Candidate) -> tuple[float, float]:
    """Of the plain ILP on one candidate (infinite: it found none), and its seconds."""
    started = time.perf_counter()
    problem = Pricer(request).problem(candidate)
    return exact.reference(problem, math.inf, Effort.of(_ILP_SECONDS)).objective, time.perf_counter() - started


def against_ilp(
    console: Console, planned: Sequence[Planned], others: int
) -> tuple[float, dict[int, tuple[float, float]]]:
    """The worst ratio, and of our own candidates the ILP's objective and seconds by cluster."""
    table = _table(
        f"the plain ILP (HiGHS, {_ILP_SECONDS:g} s each), theta {THETA:g}", "cluster", "ours", "ILP, our order"
    )
    for column in ("best of the others", "others solved", "ILP / ours", "seconds, our order"):
        table.add_column(column, justify="right")
    worst, own = math.inf, {}
    with ProcessPoolExecutor(max_workers=2) as processes:
        for each in planned:
            tried = candidates_of(each, others)
            found = list(processes.map(ilp_objective, [each.request] * len(tried), tried))
            objectives = [objective for objective, _ in found]
            ratio = min(objectives) / each.objective
            worst, own[each.cluster.number] = min(worst, ratio), found[0]
            solved = sum(math.isfinite(objective) for objective in objectives[1:])
            table.add_row(
                str(each.cluster.number),
                f"{each.objective:.4f}",
                f"{objectives[0]:.4f}",
                f"{min(objectives[1:], default=math.inf):.4f}",
                f"{solved} of {len(tried) - 1}",
                f"{ratio:.6f}",
                f"{found[0][1]:.1f}",
            )
    console.print(table)
    return worst, own


def methods(request: PlanRequest) -> Iterator[tuple[str, Found | None, float]]:
    """Each other method's best plan over all orders and pairs; transfer's within a time limit, most promising first."""
    limited = replace(request, time_limit_seconds=_HEURISTIC_SECONDS)
    every: dict[str, Callable[[], Found | None]] = {
        "bit-width transfer": lambda: Search(replace(limited, solver="transfer")).run()[0],
        "adabits": lambda: baselines.best(limited, baselines.adabits),
        "PipeEdge": lambda: baselines.best(limited, baselines.pipeedge),
        "Uniform": lambda: baselines.best(limited, baselines.even, same_micro_batches=True),
        "even": lambda: baselines.best(limited, baselines.even),
        "proportional to memory": lambda: baselines.best(limited, baselines.proportional),
        "greedy": lambda: baselines.best(limited, baselines.greedy),
        "water-filling": lambda: baselines.best(limited, baselines.water),
    }
    for name, method in every.items():
        started = time.perf_counter()
        yield name, method(), time.perf_counter() - started


def compared(console: Console, planned: Sequence[Planned], own: dict[int, tuple[float, float]], source: str) -> None:
    """A table per cluster, and whether the methods stand as in the paper."""
    table = _table(f"other methods, theta {THETA:g}; costs: {source}", "cluster", "method", "latency s", "quality s")
    for column in ("objective", "over ours", "tokens/s", "seconds"):
        table.add_column(column, justify="right")
    standing = []
    for each in planned:
        told, number = each.outcome.plan.prediction, str(each.cluster.number)
        quality = each.request.theta * told.quality_penalty
        rates = {"ours": (told.tokens_per_second, quality)}
        table.add_section()
        _method_row(table, (number, "ours", told.latency_seconds, quality), each, told.tokens_per_second, each.seconds)
        if each.cluster.number in own:
            objective, seconds = own[each.cluster.number]
            over = f"{objective / each.objective:.4f}"
            table.add_row(number, "ILP, our order", "", "", f"{objective:.3f}", over, "", f"{seconds:.2f}")
        for name, found, seconds in methods(each.request):
            if found is None:
                table.add_row(number, name, "does not fit", "", "", "", "", f"{seconds:.2f}")
                continue
            latency = found.problem.latency_seconds(found.solution.counts)
            quality = each.request.theta * found.problem.penalty(found.solution.counts)
            rates[name] = (predict(Pricer(each.request), found).tokens_per_second, quality)
            _method_row(table, (number, name, latency, quality), each, rates[name][0], seconds)
        standing.append(_standing(each.cluster.number, rates))
    console.print(table)
    for line in standing:
        console.print(line)


def _method_row(table: Table, told: tuple[str, str, float, float], ours: Planned, rate: float, seconds: float) -> None:
    number, name, latency, quality = told
    objective = latency + quality
    table.add_row(
        number,
        name,
        f"{latency:.3f}",
        f"{quality:.3f}",
        f"{objective:.3f}",
        f"{objective / ours.objective:.4f}",
        f"{rate:.1f}",
        f"{seconds:.2f}",
    )


def _standing(number: int, told: dict[str, tuple[float, float]]) -> str:
    """Ours (LLM-PQ there), PipeEdge, Uniform by tokens/s: the paper's order and ours, and where they differ, why. `told`: tokens/s
    and seconds of quality penalty.
    """
    names = ("ours", "PipeEdge", "Uniform")
    rates = {name: told[name][0] if name in told else 0.0 for name in names}
    paper = dict(zip(names, PAPER_RATES[number], strict=True))
    shown = ", ".join(f"{name} {rates[name]:.1f}" if name in told else f"{name} does not fit" for name in names)
    published = ", ".join(f"{paper[name]:g}" if paper[name] else "out of memory" for name in names)
    reasons = []
    for first, second in (("ours", "PipeEdge"), ("PipeEdge", "Uniform")):
        here, there = rates[first] / max(rates[second], 1e-9), paper[first] / max(paper[second], 1e-9)
        if abs(here - 1) < _TIE and abs(there - 1) >= _TIE:
            reasons.append(f"{first} and {second} are one plan here")
        elif (here - 1) * (there - 1) < 0:
            worse = told[second][1] - told[first][1]
            reasons.append(
                f"{second} is {1 / here - 1:.1%} faster; its quality penalty is {worse:.3g} s worse at theta {THETA:g}"
            )
    return f"cluster {number}: {shown} (paper: {published}): {'; '.join(reasons) or 'in the same order'}"


def over_even(console: Console, clusters: Sequence[PaperCluster]) -> float | None:
    """Geometric mean of tokens/s over the even split at the highest precision that fits, at no more penalty than its."""
    table = _table("planned over even, at no more quality penalty than the even split's", "cluster", "even tokens/s")
    for column in ("its bits", "ours tokens/s", "ratio", "gap"):
        table.add_column(column, justify="right")
    ratios = []
    for cluster in clusters:
        request = asked(cluster, 0.0)
        found = baselines.best(request, baselines.even)
        if found is None:
            table.add_row(str(cluster.number), "does not fit", "", "", "", "")
            continue
        rate = predict(Pricer(request), found).tokens_per_second
        bits = {key[2] for key in found.solution.counts}
        bound = found.problem.penalty(found.solution.counts)
        outcome = make_plan(replace(request, penalty_bound=bound * (1 + 1e-9)))
        ours = outcome.plan.prediction.tokens_per_second
        ratios.append(ours / rate)
        cells = (f"{rate:.1f}", f"{max(bits)}", f"{ours:.1f}", f"{ours / rate:.3f}", f"{outcome.stats.gap:.1e}")
        table.add_row(str(cluster.number), *cells)
    console.print(table)
    return statistics.geometric_mean(ratios) if ratios else None


def in_a_child(code: str) -> float:
    """The number that a fresh interpreter prints last."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


_IMPORT = "import time; t = time.process_time(); import strata_planner.search.planning; print(time.process_time() - t)"
_PEAK = """
import resource
from benchmarks.planner import CLUSTERS, asked, make_plan
for cluster in CLUSTERS:
    make_plan(asked(cluster, 10.0))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def measure(data: Path | None, *, quick: bool) -> list[Row]:
    console = Console(width=150)
    found = swept(console, 1 if quick else 2)
    at_theta = [each for each in found if each.request.theta == THETA]
    some = [each for each in at_theta if not quick or each.cluster.number in {3, 9, 10}]
    worst, own = against_ilp(console, some, 2 if quick else _OTHERS)
    compared(console, some, own, ROOFLINE)
    if data is None:
        console.print("clusters 3 and 9 with measured layer times: left out, they need --data DIR")
    else:
        measured = [plan(each, asked(each, THETA, data), 1) for each in CLUSTERS if each.number in {3, 9}]
        compared(console, measured, {}, MEASURED_2023)
    seconds = [each.seconds for each in found]
    ours, paper = "LLM-PQ with Gurobi, as published", [each.paper_seconds for each in CLUSTERS]
    ratio = over_even(console, [each.cluster for each in some])
    return [
        Row(
            "clusters_mean_seconds",
            statistics.mean(seconds),
            "s (processor)",
            ours,
            statistics.mean(paper),
            None,
            0.5,
            True,
        ),
        Row("clusters_worst_seconds", max(seconds), "s (processor)", ours, max(paper), None, 3.0, True),
        Row("clusters_gap", max(each.outcome.stats.gap for each in found), "share", goal=0.01, lower_is_better=True),
        Row("bruteforce_equal", small_share(_SMALL), "share", goal=1.0),
        Row("ilp_never_better", worst, "ILP / ours", "plain ILP on HiGHS", goal=0.9999),
        Row("planned_over_even", ratio, "tokens/s ratio", "even split, best single precision that fits"),
        Row("planner_memory_bytes", in_a_child(_PEAK), "bytes", goal=1 << 30, lower_is_better=True),
        Row(
            "import_seconds",
            min(in_a_child(_IMPORT) for _ in range(5)),
            "s (processor)",
            goal=0.3,
            lower_is_better=True,
        ),
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in {"cluster", "method"} else "right")
    return table


if __name__ == "__main__":
    folder, rest = data_folder()
    brief = "--quick" in rest
    run(
        "planner",
        lambda: [*measure(folder, quick=brief), *layouts.measure(folder, quick=brief)],
        [each for each in rest if each != "--quick"],
    )
