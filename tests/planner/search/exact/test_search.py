"""All methods answer the same request: the pool search proves what the ILP of every candidate finds, heuristics never less."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.reference import baselines
from benchmarks.reference.judge import assignment_of, judge
from strata_planner.errors import InfeasibleError, WorkloadError
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.request import PlanRequest, Solver
from strata_planner.question.workload import Workload
from strata_planner.search.exact import transfer
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.found import gap_of
from strata_planner.search.exact.orders import fleet_of, orders
from strata_planner.search.exact.pools import Prices, pools
from strata_planner.search.exact.problem import SolutionStatus
from strata_planner.search.planning import PlanOutcome, make_plan
from strata_planner.sensitivity import Sensitivity
from tests.laws import share
from tests.planner.builders import MIB, a_cluster, a_request

laws = settings(max_examples=share(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def sensitivities(layers: int) -> st.SearchStrategy[Sensitivity]:
    """No layer as another, in no order."""

    def drawn(seed: int) -> Sensitivity:
        draw = np.random.default_rng(seed)
        rows = draw.uniform((0.1, 0.05, 0.0), (9, 3, 0.2), (layers, 3))
        return Sensitivity("drawn", tuple(dict(zip(("3", "4", "8"), map(float, row), strict=True)) for row in rows))

    return st.integers(0, 2**32).map(drawn)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    memory = draw(st.lists(st.floats(2.0, 10.0), min_size=1, max_size=3))
    speeds = tuple(draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in memory)
    return a_request(
        a_cluster(*memory, speeds=speeds),
        workload=Workload(draw(st.integers(1, 60)), draw(st.integers(2, 40)), draw(st.integers(1, 6))),
        theta=draw(st.sampled_from([0.0, 0.01, 1.0])),
        sensitivity=draw(sensitivities(6)),
    )


def falling(layers: int) -> st.SearchStrategy[Sensitivity]:
    """Layers up to 30 times as sensitive as others; each bit quarters the penalty, about."""

    def drawn(seed: int) -> Sensitivity:
        draw = np.random.default_rng(seed)
        scales = 30 ** draw.uniform(0, 1, layers)
        noise = draw.uniform(0.9, 1.1, (layers, 6))
        rows = [
            {str(bits): float(scale * 4.0 ** (8 - bits) * each[bits - 3]) for bits in range(3, 9)}
            for scale, each in zip(scales, noise, strict=True)
        ]
        return Sensitivity("drawn", tuple(rows))

    return st.integers(0, 2**32).map(drawn)


def outcome(request: PlanRequest, solver: Solver = "pipeline") -> PlanOutcome | None:
    try:
        return make_plan(replace(request, solver=solver))
    except InfeasibleError:
        return None


def objective(request: PlanRequest, made: PlanOutcome) -> float:
    """As the judge has it; the plan must say the same."""
    verdict = judge(request, assignment_of(made.plan, request))
    predicted = made.plan.prediction
    assert verdict.fits
    assert verdict.latency_seconds == pytest.approx(predicted.latency_seconds)
    assert verdict.penalty == pytest.approx(predicted.quality_penalty)
    return verdict.objective


@pytest.mark.slow  # test_widths.py holds the same of few
@laws
@given(
    memory=st.lists(st.floats(2.0, 6.0), min_size=1, max_size=2),
    theta=st.sampled_from([1e-5, 1e-3, 1e-1]),
    sensitivity=falling(6),
)
def test_many_widths_are_searched_as_well_as_few(memory: list[float], theta: float, sensitivity: Sensitivity) -> None:
    request_ = a_request(
        a_cluster(*memory),
        method="anyPrecision",
        allowed_bits=(3, 4, 5, 6, 7, 8, 16),
        theta=theta,
        sensitivity=sensitivity,
    )
    ours, theirs = outcome(request_), outcome(request_, "exact")
    assert (ours is None) == (theirs is None)
    if ours and theirs:
        assert objective(request_, ours) <= objective(request_, theirs) * (1 + 1e-5)


@laws
@given(requests())
def test_the_pool_search_equals_the_ilp_of_every_candidate(request_: PlanRequest) -> None:
    ours, theirs = outcome(request_), outcome(request_, "exact")
    assert (ours is None) == (theirs is None)
    if ours and theirs:
        best = objective(request_, ours)
        assert best == pytest.approx(objective(request_, theirs), rel=1e-5)
        assert ours.stats.status is SolutionStatus.OPTIMAL
        assert ours.stats.gap <= 2e-6
        assert ours.stats.bound <= best * (1 + 1e-9)
        assert (ours.stats.orders, ours.stats.candidates) >= (theirs.stats.orders, theirs.stats.candidates)


@laws
@given(requests())
def test_heuristics_and_baselines_are_feasible_and_never_better(request_: PlanRequest) -> None:
    ours = outcome(request_)
    if ours is None:
        return
    best = objective(request_, ours)
    helped = outcome(request_, "transfer")
    if helped:
        assert objective(request_, helped) >= best * (1 - 2e-6)
        assert helped.stats.bound <= best * (1 + 1e-9)
    methods = (baselines.even, baselines.pipeedge, baselines.proportional, baselines.greedy, baselines.water)
    for method in (*methods, baselines.adabits, transfer.solve):
        found = baselines.best(replace(request_, solver="pipeline"), method)
        if found:
            assert found.problem.is_feasible(found.solution.counts)
            assert found.solution.objective == pytest.approx(found.problem.objective(found.solution.counts))
            assert found.solution.objective >= best * (1 - 2e-6)


@laws
@given(requests(), st.floats(0.05, 0.95))
def test_a_bound_of_the_penalty_is_kept_and_its_price_reported(request_: PlanRequest, share: float) -> None:
    free = outcome(request_)
    if free is None:
        return
    bounded = replace(request_, penalty_bound=free.plan.prediction.quality_penalty * share)
    ours, theirs = outcome(bounded), outcome(bounded, "exact")
    assert (ours is None) == (theirs is None)
    if ours and theirs:
        assert bounded.penalty_bound is not None
        assert ours.plan.prediction.quality_penalty <= bounded.penalty_bound * (1 + 1e-9)
        best = objective(bounded, theirs)
        assert ours.stats.bound <= best * (1 + 1e-5)
        assert objective(bounded, ours) * (1 - ours.stats.gap) <= best * (1 + 1e-5)


def test_a_penalty_that_nothing_reaches_is_told_with_the_least_that_fits() -> None:
    request = a_request(a_cluster(1.2, 1.2), sensitivity=Sensitivity("flat", ({"3": 1.0, "4": 0.5, "8": 0.1},) * 6))
    with pytest.raises(InfeasibleError, match=r"quality penalty of at most 1e-06; the least that fits is [\d.]+"):
        make_plan(replace(request, penalty_bound=1e-6))


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(WorkloadError, match="solver 'best': choose from auto, pipeline, exact, transfer, layout"):
        make_plan(a_request(solver="best"))


def test_transfer_gives_what_the_straggler_cannot_do_in_time() -> None:
    """From adabits, which knows no time, most layers go to the device that is eight times as fast."""
    request = a_request(a_cluster(64, 64, speeds=(1.0, 8.0)), min_stages=2, theta=1e-6)
    made = outcome(request, "transfer")
    assert made is not None
    layers = {stage.node: len(stage.bits) for stage in made.plan.replicas[0].stages}
    assert layers["b"] > layers["a"]


FLEETS = {
    "one kind": Cluster((Node("a", (Device("T4", 3),)),)),
    "two kinds": Cluster((Node("a", (Device("T4", 2),)), Node("b", (Device("L4", 2),)))),
    "equal nodes": Cluster((Node("a", (Device("T4", 2),)), Node("b", (Device("T4", 2),)))),
    "two kinds on a node": Cluster((Node("a", (Device("T4", 1), Device("L4", 2))),)),
}


@pytest.mark.parametrize("cluster", FLEETS.values(), ids=FLEETS)
def test_pools_hold_every_order(cluster: Cluster) -> None:
    """By what tells orders apart: the kinds of the devices, and which neighbours share a node."""

    def seen(order: tuple[object, ...]) -> tuple[object, ...]:
        names = [(group.leader.type, group.leader.node) for group in order]  # type: ignore[attr-defined]
        number = {node: i for i, node in enumerate(dict.fromkeys(node for _, node in names))}
        return tuple((kind, number[node]) for kind, node in names)

    fleet = fleet_of(cluster)
    wanted = {seen(order) for order in orders(fleet, range(1, fleet.size + 1))}
    found = set()
    for pool in pools(fleet, range(1, fleet.size + 1)):
        for classes in set(itertools.permutations([c for c, n in enumerate(pool.used) for _ in range(n)])):
            steps = pool.steps_of(classes)
            found.add(seen(pool.order(steps)))
    assert found == wanted


def test_a_lattice_costs_what_the_candidates_cost() -> None:
    """Any path of a pool's lattice: its hops and stages are those of the candidate with the same order."""
    request = a_request(a_cluster(64, 48, 32, speeds=(1.0, 2.0, 4.0)))
    pricer, fleet = Pricer(request), fleet_of(request.cluster)
    prices = Prices(pricer, fleet)
    pool = next(iter(pools(fleet, [3])))
    penalty = np.zeros((request.model.num_layers, len(request.bits)))
    for order in orders(fleet, [3]):
        for candidate in pricer.micro_batches(order):
            lattice = pool.lattice(prices, candidate.pair, penalty)
            problem = pricer.problem(candidate)
            steps = pool.steps_of([fleet.class_of(group) for group in order])
            hops = [level.hop_sum[step] for level, step in zip(lattice.levels, steps, strict=True)]
            wanted = [stage.transfer_seconds for stage in problem.stages]
            for phase in (0, 1):
                assert sum(hop[phase] for hop in hops) == pytest.approx(sum(hop[phase] for hop in wanted))
            kinds = [lattice.kinds[level.kind[step]] for level, step in zip(lattice.levels, steps, strict=True)]
            assert [kind.signature for kind in kinds] == [stage.signature for stage in problem.stages]


@pytest.mark.parametrize(
    ("objective_", "bound", "gap"), [(10, 9, 0.1), (10, 10, 0), (10, 11, 0), (10, -float("inf"), float("inf"))]
)
def test_gaps(objective_: float, bound: float, gap: float) -> None:
    assert gap_of(objective_, bound) == pytest.approx(gap)


def test_the_judge_sees_what_does_not_fit() -> None:
    request = a_request(a_cluster(64, 64), min_stages=2)
    made = make_plan(request)
    tight = replace(request, cluster=a_cluster(1.0, 64))
    given = assignment_of(made.plan, request)
    small = tight.cluster.accelerators()
    moved = replace(given, order=tuple(type(group)((small[j],)) for j, group in enumerate(given.order)))
    assert judge(request, given).fits
    assert not judge(tight, moved).fits
    assert min(judge(tight, moved).free_bytes) > -64 * MIB
