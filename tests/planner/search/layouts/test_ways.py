"""Ways to run a pipeline: no estimate passes its bound, what is left out would not have been better, of equals the first."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_planner.question.cluster import Cluster, Node
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts import ways
from strata_planner.search.layouts.pipelines import Pipelines
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.ways import Estimate, Ways
from tests.laws import share
from tests.planner.builders import a_profile
from tests.planner.search.layouts.layouts import a_device, a_pool, a_pool_request

NODES = {"a": 4, "b": 2, "c": 2, "d": 3}
COMPOSITIONS = st.tuples(*(st.integers(0, count) for count in NODES.values())).filter(any)
FEW, ALL = 0, 1 << 60


def a_mixed_pool() -> Cluster:
    """Nodes a and b of slow devices, c and d of quick ones."""
    profiles = {"slow": a_profile(type="slow"), "quick": a_profile(type="quick", **QUICK)}
    types = {"a": "slow", "b": "slow", "c": "quick", "d": "quick"}
    nodes = (Node(name, (msgspec.structs.replace(a_device(count), type=types[name]),)) for name, count in NODES.items())
    return msgspec.structs.replace(a_pool(**NODES), nodes=tuple(nodes), profiles=profiles)


QUICK = {"bandwidth_bytes_per_second": 3e9, "flops_per_second": 8e9}
REQUESTS = {
    "at one width": a_pool_request(a_mixed_pool(), allowed_bits=(16,), theta=0.0),
    "many at once": a_pool_request(a_mixed_pool(), allowed_bits=(16,), workload=Workload(64, 16, concurrency=200)),
    "at several widths": a_pool_request(a_mixed_pool(), allowed_bits=(4, 8, 16), theta=0.3),
    "within a bound of the penalty": a_pool_request(a_mixed_pool(), allowed_bits=(4, 8, 16), penalty_bound=0.2),
}


@pytest.fixture(autouse=True)
def _few() -> Iterator[None]:
    before = ways._FEW
    yield
    ways._FEW = before


def ways_of(request: PlanRequest, composition: Composition) -> Ways:
    pipelines = Pipelines(request, Pool(request.cluster))
    return Ways(pipelines.stages, [pipelines._way(option) for option in pipelines.options(composition)])


def estimate(request: PlanRequest, composition: Composition, few: int) -> Estimate:
    """Of so few ways that all are looked at."""
    ways._FEW = few
    return ways_of(request, composition).estimate()


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=share(25, 5), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(composition=COMPOSITIONS)
def test_what_is_left_out_is_no_better(name: str, composition: Composition) -> None:
    """Layers dealt unevenly are left out too where even ones are far behind: some percent may be lost."""
    bounded, whole = (estimate(REQUESTS[name], composition, few) for few in (FEW, ALL))
    assert (bounded.rates <= whole.rates * (1 + 1e-9)).all()
    assert bounded.rates == pytest.approx(whole.rates, rel=0.01)
    assert bounded.places.tolist() == whole.places.tolist()
