"""Laws of routing: every token is sent to as many experts as it must, uneven routing reads fewer, and hot experts wait for their products."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.costs.routing import EVEN_UP_TO, chances, spread
from strata_planner.costs.source import Phase, Rates
from tests.planner.builders import a_model, a_profile
from tests.planner.costs.test_latency import layer_seconds

SIZES = st.integers(1, 300).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts)))


@given(sizes=SIZES)
def test_a_token_is_sent_to_as_many_experts_as_it_must(sizes: tuple[int, int]) -> None:
    chosen = chances(*sizes)
    assert len(chosen) == sizes[0]
    assert sum(chosen) == pytest.approx(sizes[1])
    assert list(chosen) == sorted(chosen, reverse=True)
    assert 0 < chosen[-1] <= chosen[0] <= 1


@given(sizes=SIZES, tokens=st.integers(1, 5000))
def test_never_more_experts_are_read_than_by_even_routing(sizes: tuple[int, int], tokens: int) -> None:
    experts, active = sizes
    even = experts * (1 - (1 - active / experts) ** tokens)
    read = spread(experts, active, tokens).read[-1]
    assert min(active, even) <= read * (1 + 1e-9)
    assert read <= even * (1 + 1e-9)
    if experts <= EVEN_UP_TO:
        assert read == pytest.approx(even)


@given(
    sizes=SIZES,
    tokens=st.integers(1, 5000),
    costs=st.tuples(*[st.floats(1e-9, 1e3)] * 3),
)
def test_each_expert_is_bound_by_its_products_or_by_its_bytes(
    sizes: tuple[int, int], tokens: int, costs: tuple[float, float, float]
) -> None:
    multiplying, reading, moving = costs
    expected = sum(
        max(multiplying * chance, reading * (1 - (1 - chance) ** tokens) + moving * chance)
        for chance in chances(*sizes)
    )
    assert spread(*sizes, tokens).seconds(multiplying, reading, moving) == pytest.approx(expected)


def test_the_assumption_is_what_its_source_says() -> None:
    """Of Qwen3-235B's 128 experts a fifth takes about two thirds of the tokens."""
    chosen = chances(128, 8)
    assert sum(chosen[: 128 // 5]) / 8 == pytest.approx(0.65, abs=0.02)


def test_a_layer_of_many_experts_decodes_faster_than_even_routing_would_say() -> None:
    layer = a_model(model_type="qwen3_moe", num_experts=64, num_experts_per_tok=4, moe_intermediate_size=64).layers[0]
    rates = Rates(a_profile(flops_per_second=1e15), "bfloat16", 16)
    one, some, all_of_them = (layer_seconds(layer, "dense", rates, Phase(tokens, 1, 0)) for tokens in (1, 16, 10_000))
    expert = 3 * 64 * 128 * 2 / (1e9 * 0.5)
    assert 4 * expert < one < some
    assert some < 64 * (1 - (1 - 4 / 64) ** 16) * expert * 0.9
    assert all_of_them > 63 * expert
