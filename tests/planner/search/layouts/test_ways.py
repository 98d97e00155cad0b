"""Ways to run a pipeline: no estimate passes its bound, what is left out would not have been better, of equals the first."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.question.cluster import Cluster, Node
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts import ways
from strata_planner.search.layouts.pipelines import Pipelines
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.ways import Estimate, Ways
from tests.laws import share
from tests.planner.builders import a_model, a_profile
from tests.planner.search.layouts.layouts import a_device, a_pool, a_pool_request

NODES = {"a": 4, "b": 2, "c": 2, "d": 3}
COMPOSITIONS = st.tuples(*(st.integers(0, count) for count in NODES.values())).filter(any)
TYPES = {"a": "slow", "b": "slow", "c": "quick", "d": "quick"}
PROFILES = {
    "slow": a_profile(type="slow"),
    "quick": a_profile(type="quick", bandwidth_bytes_per_second=3e9, flops_per_second=8e9),
}


def a_mixed_request(memory_mib: float = 2.2, **changes: Any) -> PlanRequest:
    nodes = (
        Node(name, (msgspec.structs.replace(a_device(count, memory_mib), type=TYPES[name]),))
        for name, count in NODES.items()
    )
    cluster: Cluster = msgspec.structs.replace(a_pool(**NODES), nodes=tuple(nodes), profiles=PROFILES)
    return a_pool_request(cluster, **changes)


MANY = Workload(prompt_tokens=64, output_tokens=16, concurrency=200)
REQUESTS = {
    "one width": a_mixed_request(theta=0.0),
    "many at once": a_mixed_request(workload=MANY),
    "several widths": a_mixed_request(allowed_bits=(4, 8, 16), theta=0.3),
    "a bound of the penalty": a_mixed_request(allowed_bits=(4, 8, 16), penalty_bound=0.2),
    "a head as large as many layers": a_mixed_request(40.0, model=a_model(vocab_size=65536), workload=MANY),
}


def ways_of(request: PlanRequest, composition: Composition) -> Ways:
    pipelines = Pipelines(request, Pool(request.cluster))
    return Ways(pipelines.stages, [pipelines._way(option) for option in pipelines.options(composition)])


def estimate(request: PlanRequest, composition: Composition, few: int, most: int = 1 << 20) -> Estimate:
    """Ways of no more than `few` stages times columns are all looked at, and up to `most` together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "_FEW", few)
        patch.setattr(ways, "_MOST_AT_ONCE", most)
        return ways_of(request, composition).estimate()


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=share(25, 5), deadline=None)
@given(composition=COMPOSITIONS)
def test_what_is_left_out_is_no_better(name: str, composition: Composition) -> None:
    """Layers dealt unevenly are left out too where even ones are far behind: some percent may be lost."""
    bounded, whole = (estimate(REQUESTS[name], composition, few) for few in (0, 1 << 60))
    assert (bounded.rates <= whole.rates * (1 + 1e-9)).all()
    assert bounded.rates == pytest.approx(whole.rates, rel=0.01)


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=share(25, 5), deadline=None)
@given(composition=COMPOSITIONS)
def test_no_way_passes_its_bound(name: str, composition: Composition) -> None:
    """At one width; mixtures of two are offered in the end."""
    for each in ways_of(REQUESTS[name], composition)._alike:
        each.offer_all()
        able = each._able
        assert (each._rates[able] <= each._bounds[able] * ways._SURE).all()


@pytest.mark.parametrize("few", [0, 1 << 60])
@settings(max_examples=share(15, 3), deadline=None)
@given(composition=COMPOSITIONS)
def test_together_ways_are_as_good_as_one_by_one(few: int, composition: Composition) -> None:
    """Of few stages, whose sums are the same whatever is beside them; of equals the first is told either way."""
    together, apart = (estimate(REQUESTS["several widths"], composition, few, most) for most in (1 << 20, 1))
    assert together.rates.tolist() == apart.rates.tolist()
    assert (together.places.tolist(), together.splits) == (apart.places.tolist(), apart.splits)


def test_of_ways_that_are_too_many_one_part_has_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_MOST_AT_ONCE", 1)
    tried = ways_of(REQUESTS["several widths"], (4, 2, 2, 3))
    with_tables: list[int] = []
    built = ways._steps

    def counted(*args: Any) -> Any:
        with_tables.append(sum("_tables" in vars(each) for each in tried._alike))
        return built(*args)

    monkeypatch.setattr(ways, "_steps", counted)
    tried.estimate()
    assert len(tried._alike) > 1
    assert set(with_tables) == {0}
