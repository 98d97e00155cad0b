"""The three strategies are found, known by their structure, and run from one layout."""

import pytest

from strata_planner.contract.strategies import STRATEGIES
from strata_planner.partition.chain import decoder_chain
from strata_planner.partition.naming import find_strategies, recognised, serves, shared_layout
from strata_planner.partition.states import CS, RS, R, Volume
from tests.laws import swept


@pytest.mark.slow
@pytest.mark.parametrize("convention", Volume)
@pytest.mark.parametrize("gated", swept([False, True], [True]))
def test_all_three_are_on_the_front(convention: Volume, *, gated: bool) -> None:
    found = find_strategies(gated=gated, convention=convention)
    assert tuple(found.strategies) == STRATEGIES
    for name, strategy in found.strategies.items():
        assert strategy in found.front
        assert recognised(strategy) == name


@pytest.mark.parametrize("gated", [False, True])
def test_one_layout_serves_all_three_and_is_the_papers(*, gated: bool) -> None:
    found = find_strategies(gated=gated)
    assert found.layout == {"qkv": CS, "w0": R, "w1": CS, "w2": RS}
    assert all(found.fits(strategy) for strategy in found.strategies.values())
    # Nothing smaller would do: what is not replicated in it is replicated in none of them.
    assert found.layout_bytes == found.strategies["projection-replicated"].costs(Volume.PAPER).weight_bytes


def test_a_layout_serves_what_it_holds_and_views_of_replicas() -> None:
    held = {"qkv": CS, "w0": R, "w1": CS, "w2": RS}
    assert serves(held, held | {"w0": RS})
    assert serves(held, held | {"w0": CS})
    assert not serves(held, held | {"w1": RS})
    assert not serves(held, held | {"w1": R})


def test_conflicting_wishes_replicate_a_weight() -> None:
    found = find_strategies(gated=False)
    replicated = [each for each in found.front if each.layout["w1"] is R][:1]
    chosen, layout = shared_layout(decoder_chain(gated=False), [[found.strategies["megatron"]], replicated])
    assert layout["w1"] is R
    assert all(serves(layout, each.layout) for each in chosen)


@pytest.mark.parametrize("gated", [False, True])
def test_all_three_move_no_more_often_than_they_must(*, gated: bool) -> None:
    """An all-reduce is one step, not a reduce-scatter and an all-gather of the same volume."""
    moves = {name: len(list(each.moves)) for name, each in find_strategies(gated=gated).strategies.items()}
    assert moves == {"megatron": 2, "projection-replicated": 2, "weight-gathered": 4}


@pytest.mark.parametrize("gated", [False, True])
def test_all_three_attend_alike(*, gated: bool) -> None:
    """So the length at which one gives way to another does not depend on how long the context before a chunk is."""
    costs = {each.costs(Volume.TRAFFIC).attention_flops for each in find_strategies(gated=gated).strategies.values()}
    assert len(costs) == 1


def test_other_strategies_have_no_name() -> None:
    front = find_strategies(gated=True).front
    assert any(recognised(each) is None for each in front)
