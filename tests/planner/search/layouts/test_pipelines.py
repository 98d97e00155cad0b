"""Pipelines of compositions: the devices that were given, what is remembered equals what is worked out, estimates near the plan."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.question.cluster import Cluster, Link
from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.clusters import grouped
from strata_planner.search.layouts.pipelines import Pipelines
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.search import laid
from strata_planner.search.layouts.stages import ladder
from tests.laws import share
from tests.planner.search.layouts.layouts import a_pool, a_pool_request

NODES = {"a": 3, "b": 3, "c": 2, "d": 3}
COMPOSITIONS = st.tuples(*(st.integers(0, count) for count in NODES.values())).filter(any)


def a_far_pool() -> Cluster:
    """a and b are near each other, c and d are, the pairs are far apart."""
    far = tuple(Link(one, other, gbps=0.5, latency_ms=50.0) for one in "ab" for other in "cd")
    return msgspec.structs.replace(a_pool(**NODES), links=far)


CLUSTERS = {"alike": a_pool(**NODES), "far apart": a_far_pool()}
SHARED = {name: Pipelines(a_pool_request(cluster), Pool(cluster)) for name, cluster in CLUSTERS.items()}


def fresh(name: str) -> tuple[PlanRequest, Pool]:
    return a_pool_request(CLUSTERS[name]), Pool(CLUSTERS[name])


@pytest.mark.parametrize("name", CLUSTERS)
@settings(max_examples=share(40, 8), deadline=None)
@given(composition=COMPOSITIONS)
def test_what_is_remembered_is_what_would_be_worked_out(name: str, composition: Composition) -> None:
    remembered, anew = SHARED[name].best(composition), Pipelines(*fresh(name)).best(composition)
    assert (remembered is None) == (anew is None)
    if remembered is None or anew is None:
        return
    assert remembered.rates == pytest.approx(anew.rates)
    for groups in (each for each in remembered.groups if each):
        counts: Counter[int] = Counter()
        for group in groups:
            counts.update(group.classes)
        assert tuple(counts[c] for c in range(len(composition))) == composition


@settings(max_examples=share(15), deadline=None)
@given(composition=COMPOSITIONS.filter(lambda each: sum(each) > 1))
def test_the_plan_is_near_its_estimate(composition: Composition) -> None:
    """Fractions of layers against whole ones: of six layers the difference can be large, and is never in the plan's favour by
    more than what other prefill micro-batches bring.
    """
    request, pool = fresh("alike")
    pipeline = Pipelines(request, pool).best(composition)
    if pipeline is None:  # more stages than layers
        return
    layout = laid(request, (composition,))
    rung = ladder(request.workload.concurrency).index(layout.replicas[0].concurrency)
    assert 0.5 < layout.tokens_per_second / pipeline.rates[rung] < 1.25


def test_the_first_groups_are_the_near_nodes() -> None:
    assert sorted(map(sorted, grouped(Pool(a_far_pool()), seed=0))) == [["a", "b"], ["c", "d"]]


@given(most=st.integers(1, 5000))
def test_the_ladder_rises_to_its_end(most: int) -> None:
    rungs = ladder(most)
    assert rungs[0] == 1
    assert rungs[-1] == most
    assert list(rungs) == sorted(set(rungs))
