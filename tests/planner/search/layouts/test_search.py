"""Layouts: devices used once, models that fit, the same seed the same layout, replanning that leaves alone what still works."""

import dataclasses
import math
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.errors import ClusterError, InfeasibleError, WorkloadError
from strata_planner.question.cluster import Cluster, Link, LinkRate, Node
from strata_planner.question.request import GoalName, Objective, PlanRequest
from strata_planner.question.workload import Workload
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
    value_of,
)
from strata_planner.search.layouts.solved import nearly_solved
from tests.laws import share, swept
from tests.planner.builders import a_cluster, a_request
from tests.planner.search.layouts.layouts import a_device, a_pool, a_pool_request, used

QUICK = Wish(stall=100, seconds=60.0)
GOALS = {
    "throughput": Goal(),
    "latency": Goal("latency"),
    "slo": Goal("slo", Deadlines((0.05, 0.1, 0.2), (50.0, 100.0))),
    "cost": Goal("cost"),
}


def found(request: PlanRequest, goal: str = "throughput", seed: int = 0) -> Layout:
    return best_layout(request, dataclasses.replace(QUICK, goal=GOALS[goal], seed=seed))


def priced(cluster: Cluster) -> Cluster:
    nodes = tuple(
        Node(node.name, tuple(msgspec.structs.replace(device, hourly_cost=1.0) for device in node.devices))
        for node in cluster.nodes
    )
    return msgspec.structs.replace(cluster, nodes=nodes)


def test_a_search_with_no_work_left_goes_on_until_something_holds_the_model() -> None:
    """Four nodes near each other do not quite hold it: small layouts, which come first, are of those."""
    zones = ("abcd", "efgh", "ijkl")
    nodes = tuple(Node(name, (a_device(1, 1.05),)) for zone in zones for name in zone)
    links = tuple(Link(*pair, gbps=10, latency_ms=0.1) for zone in zones for pair in combinations(zone, 2))
    far = LinkRate(gbps=0.1, latency_ms=50)
    cluster = msgspec.structs.replace(a_pool(a=1), nodes=nodes, links=links, default_link=far)
    layout = best_layout(a_pool_request(cluster, tensor_parallel=(1,)), Wish(work=1e-9, thorough=False))
    assert [len(each.order) for each in layout.replicas] == [6]


@settings(max_examples=share(40), deadline=None)
@given(speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4), seed=st.integers(0, 3))
def test_no_other_beginning_of_a_ring_is_better(speeds: list[float], seed: int) -> None:
    """The embedding and the head lie at its ends, and are as large as many layers."""
    request = a_request(a_cluster(*[4.0] * len(speeds), speeds=tuple(speeds)), max_replicas=1, theta=0.0)
    layout = best_layout(request, dataclasses.replace(QUICK, seed=seed))
    (replica,) = layout.replicas
    for begin in range(len(replica.order)):
        turned = (*replica.order[begin:], *replica.order[:begin])
        other = nearly_solved(request, turned, replica.concurrency)
        assert other is None or value_of(request, (other,)) <= layout.value(request) * (1 + 1e-6)


@settings(max_examples=share(12), deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda each: max(each) > 1),
    goal=st.sampled_from(sorted(GOALS)),
)
def test_devices_serve_once_and_every_replica_holds_the_model(counts: list[int], goal: str) -> None:
    request = a_pool_request(priced(a_pool(**dict(zip("abc", counts, strict=False)))))
    layout = found(request, goal)
    places = used(layout)
    assert len(places) == len(set(places))
    assert len(places) + layout.idle == sum(counts)
    plan = layout_plan(layout)
    plan.check()
    for stage in (stage for replica in plan.replicas for stage in replica.stages):
        assert stage.memory.total_bytes <= min(device.usable_bytes for device in stage.devices)


@pytest.mark.parametrize("goal", swept(sorted(GOALS), ["cost"]))
def test_the_same_seed_finds_the_same_layout(goal: str) -> None:
    request = a_pool_request(priced(a_pool(a=4, b=3)))
    one, other = (found(request, goal, seed=3) for _ in range(2))
    assert one.replicas == other.replicas
    assert one.stats.score == other.stats.score


@pytest.mark.slow
def test_work_ends_a_search_as_no_clock_does() -> None:
    """A bound of work gives the same plan however fast the machine is, and is not told as a search that was cut."""
    request = a_pool_request(a_pool(a=5, b=4, c=3))
    free = best_layout(request, dataclasses.replace(QUICK, stall=1000, work=math.inf))
    bound = dataclasses.replace(QUICK, stall=1000, work=30_000.0)
    one, other = (best_layout(request, dataclasses.replace(bound, seconds=seconds)) for seconds in (60.0, 600.0))
    assert one.replicas == other.replicas
    assert one.stats.evaluations < free.stats.evaluations
    assert one.stats.cut_after_seconds is None
    assert one.stats.ended_by_work
    assert not free.stats.ended_by_work


@pytest.mark.slow  # test_plan_laws.py has the plans
@pytest.mark.parametrize("goal", swept(["throughput", "latency"], ["latency"]))
def test_more_devices_never_estimate_less_from_the_smaller_pools_layout(goal: str) -> None:
    small, large = a_pool_request(a_pool(a=4, b=2)), a_pool_request(a_pool(a=4, b=2, c=3))
    wish = dataclasses.replace(QUICK, goal=GOALS[goal])
    before = best_layout(small, wish)
    pool = Pool(large.cluster)
    start = tuple(composition_of(pool, _nodes(each.places)) for each in before.replicas)
    assert best_layout(large, wish, starts=(start,)).stats.score >= before.stats.score - 1e-9 * abs(before.stats.score)


def _nodes(places: frozenset[tuple[str, str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node, _, _ in places:
        counts[node] = counts.get(node, 0) + 1
    return counts


def test_replanning_keeps_untouched_replicas_and_uses_only_what_is_left() -> None:
    request = a_pool_request(a_pool(a=4, b=4, c=2))
    running = laid(request, ((4, 0, 0), (0, 4, 0), (0, 0, 2)), QUICK)
    smaller = dataclasses.replace(request, cluster=a_pool(a=2, b=4, c=2))
    layout = replan_layout(smaller, running, QUICK)
    there = {device.place for device in smaller.cluster.accelerators()}
    kept = [each for each in running.replicas if each.places <= there]
    assert len(kept) == 2
    assert all(each in layout.replicas for each in kept)
    assert len(layout.replicas) == 3
    assert set(used(layout)) <= there
    layout_plan(layout).check()


def test_replanning_with_nothing_left_to_deal_out_keeps_what_runs() -> None:
    request = a_pool_request(a_pool(a=4, b=2))
    running = laid(request, ((4, 0), (0, 2)), QUICK)
    layout = replan_layout(dataclasses.replace(request, cluster=a_pool(a=4)), running, QUICK)
    assert layout.replicas == running.replicas[:1]
    assert layout.idle == 0


def test_tensor_parallel_groups_are_equal_devices_of_one_node() -> None:
    request = a_pool_request(
        Cluster((Node("a", (a_device(2),)), Node("b", (a_device(3),))), profiles=a_pool(a=1).profiles)
    )
    for group in (group for each in found(request).replicas for group in each.order):
        assert len({(device.node, device.type) for device in group.devices}) == 1


@pytest.mark.parametrize("degrees", [(4,), (2, 1, 1), (1, 1, 2), (1, 1, 1, 1)])
def test_named_degrees_are_kept(degrees: tuple[int, ...]) -> None:
    layout = laid(a_pool_request(a_pool(a=4)), ((4,),), QUICK, degrees=(degrees,))
    assert tuple(group.degree for group in layout.replicas[0].order) == degrees


def test_degrees_that_part_no_class_are_told() -> None:
    with pytest.raises(WorkloadError, match="of one class"):
        laid(a_pool_request(a_pool(a=2, b=1)), ((2, 1),), QUICK, degrees=((1, 2),))


@pytest.mark.parametrize("wished", swept([(1,), (2,), (4, 2)], [(2,), (4, 2)]))
def test_only_wished_degrees_are_used(wished: tuple[int, ...]) -> None:
    request = a_pool_request(a_pool(a=5, b=3), tensor_parallel=wished)
    assert {group.degree for each in found(request).replicas for group in each.order} <= set(wished)


WRONG = {
    "costs that nobody named": (GOALS["cost"], ClusterError, "hourlyCost"),
    "deadlines that nobody named": (Goal("slo"), WorkloadError, "deadlines"),
}


@pytest.mark.parametrize(("goal", "error", "words"), WRONG.values(), ids=WRONG)
def test_a_goal_without_its_figures_is_told(goal: Goal, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        best_layout(a_pool_request(a_pool(a=4)), dataclasses.replace(QUICK, goal=goal))


def test_a_pool_that_cannot_hold_the_model_is_told() -> None:
    with pytest.raises(InfeasibleError):
        best_layout(a_pool_request(a_pool(a=1)), QUICK)


def test_fewer_bits_where_memory_is_short() -> None:
    request = a_pool_request(a_pool(a=1), allowed_bits=(4, 8, 16))
    plan = layout_plan(best_layout(request, QUICK))
    assert max(plan.replicas[0].stages[0].bits) <= 16
    assert min(plan.replicas[0].stages[0].bits) < 16


@settings(max_examples=share(30, 6), deadline=None)
@given(
    counts=st.sampled_from([(2,), (3,), (1, 2), (3, 2)]),
    goal=st.sampled_from(["throughput", "latency"]),
    theta=st.sampled_from([0.01, 1.0, 100.0]),
    sequences=st.sampled_from([4, 16, 64]),
)
def test_bits_that_need_not_be_taken_make_no_plan_worse(
    counts: tuple[int, ...], goal: GoalName, theta: float, sequences: int
) -> None:
    """Also where memory is too small for most sequences at the bits that are worth most, or for all layers at any of them. By a tenth: kernels of more
    widths take the room of a sequence of such small devices.
    """
    load = Workload(prompt_tokens=32, output_tokens=16, concurrency=sequences)
    request = a_pool_request(
        a_pool(**dict(zip("ab", counts, strict=False))), workload=load, theta=theta, objective=Objective(goal)
    )
    asked = [dataclasses.replace(request, allowed_bits=bits) for bits in ((4, 8, 16), (4,), (8,), (16,))]
    free, *narrow = (best_layout(each, QUICK).value(each) for each in asked)
    assert free >= max(narrow) - 0.1 * abs(max(narrow))
