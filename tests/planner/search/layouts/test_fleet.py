"""Fleets: devices once, rates below the bound, and what the genetic search finds below it too."""

import dataclasses

import msgspec
import pytest

from strata_planner.errors import ClusterError
from strata_planner.question.cluster import Cluster, Link
from strata_planner.search.layouts.bound import most_tokens_per_second
from strata_planner.search.layouts.fleet import fleet_layout
from strata_planner.search.layouts.search import Wish, best_layout
from strata_planner.search.layouts.solved import plan_of
from tests.laws import swept
from tests.planner.search.layouts.layouts import a_pool, a_pool_request, used

COUNTS = {
    "one type": {f"a{number}": 4 for number in range(6)},
    "two types": {f"a{number}": 4 for number in range(4)} | {f"b{number}": 2 for number in range(3)},
}


@pytest.mark.parametrize("name", swept(COUNTS, ["two types"]))
def test_devices_serve_once_below_the_bound(name: str) -> None:
    counts = COUNTS[name]
    request = a_pool_request(a_pool(**counts))
    request = dataclasses.replace(
        request, workload=msgspec.structs.replace(request.workload, concurrency=64), theta=0.0
    )
    layout = fleet_layout(request)
    places = [place for each in layout.replicas for group in each.order for place in group.places]
    assert len(places) == len(set(places))
    assert len(places) + layout.idle == sum(counts.values())
    assert sum(each.concurrency for each in layout.replicas) <= 64
    assert 0 < layout.tokens_per_second <= layout.bound
    plan_of(layout.replicas).check()


@pytest.mark.slow  # test_bound.py has the law
def test_no_layout_of_the_search_passes_the_bound() -> None:
    request = a_pool_request(a_pool(a=4, b=2, c=3), theta=0.0)
    layout = best_layout(request, Wish(stall=100))
    assert used(layout)
    assert layout.tokens_per_second <= most_tokens_per_second(request)


def test_links_of_their_own_are_told() -> None:
    cluster = msgspec.structs.replace(a_pool(a=2, b=2), links=(Link("a", "b", 1.0),))
    with pytest.raises(ClusterError, match="links of their own"):
        fleet_layout(a_pool_request(Cluster(cluster.nodes, links=cluster.links, profiles=cluster.profiles)))
