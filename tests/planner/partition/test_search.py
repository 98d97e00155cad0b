"""The search finds what backtracking finds, and what the paper found."""

import pytest

from benchmarks.dynpart import AS_OPT, QKV_BYTES, TABLE_4_1
from strata_planner.contract.strategies import STRATEGIES, StrategyName
from strata_planner.partition.chain import Chain, decoder_chain
from strata_planner.partition.naming import find_strategies
from strata_planner.partition.polynomial import constant, symbol
from strata_planner.partition.search import count_sequences, dominates, pareto_front, sequences
from strata_planner.partition.states import (
    ACTIVATION_STATES,
    ATTENTION_STATES,
    COLLECTIVES,
    NORM_STATES,
    PRODUCTS,
    Collective,
    R,
    Volume,
    ring_steps,
    volume,
)
from strata_planner.partition.strategy import Costs, Kind, Move, Strategy
from tests.laws import swept


def _half(chain: Chain, first: int, last: int) -> Chain:
    return Chain(chain.operations[first:last], chain.gated)


HALVES = {
    "attention": _half(decoder_chain(gated=False), 0, 5),
    "attention, no residual": _half(decoder_chain(gated=False, residuals=False), 0, 4),
    "mlp": _half(decoder_chain(gated=True), 5, 10),
    "mlp, no residual": _half(decoder_chain(gated=False, residuals=False), 4, 8),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_symbolic_costs_are_those_of_the_papers_table(name: StrategyName) -> None:
    """DynPart, table 4.1. Its weight memory leaves the QKV weights out, the same in all three."""
    costs = find_strategies(gated=False).strategies[name].costs(Volume.PAPER)
    flops, communication, memory = TABLE_4_1[name]
    assert costs.weight_flops.at(**AS_OPT) == flops
    assert costs.communication_bytes.at(**AS_OPT) == communication
    assert costs.weight_bytes.at(**AS_OPT) == memory + QKV_BYTES


@pytest.mark.parametrize("convention", swept(Volume, [Volume.PAPER]))
@pytest.mark.parametrize("name", HALVES)
def test_the_front_is_the_front_of_all_sequences(name: str, convention: Volume) -> None:
    """Pruning behind each place loses nothing, and nothing that is left is dominated by any valid sequence."""
    chain = HALVES[name]
    everything = list(sequences(chain))
    assert len(everything) == count_sequences(chain) == len({each.steps for each in everything})
    costs = {each.costs(convention) for each in everything}
    best = {each for each in costs if not any(dominates(other, each) for other in costs)}
    front = pareto_front(chain, convention)
    assert {each.costs(convention) for each in front} == best
    assert set(front) <= set(everything)


@pytest.mark.parametrize("gated", swept([False, True], [True]))
@pytest.mark.parametrize("convention", swept(Volume, [Volume.PAPER]))
def test_no_strategy_on_the_front_is_dominated(convention: Volume, *, gated: bool) -> None:
    costs = {each.costs(convention) for each in find_strategies(gated=gated, convention=convention).front}
    assert not any(dominates(other, each) for each in costs for other in costs)


def test_a_whole_layer_has_hundreds_of_thousands_of_sequences() -> None:
    """As the paper says of its own search (section 4.1); with residuals kept, some of their branches multiply."""
    assert count_sequences(decoder_chain(gated=True, residuals=False)) == 95_101
    assert count_sequences(decoder_chain(gated=True)) == 274_697


@pytest.mark.slow  # the others have residuals
def test_without_residuals_the_three_cost_the_same() -> None:
    """The paper leaves residuals out 'for simplicity': they change neither costs nor validity of what it found."""
    plain = {
        each.costs(Volume.PAPER) for each in pareto_front(decoder_chain(gated=True, residuals=False), Volume.PAPER)
    }
    named = find_strategies(gated=True).strategies.values()
    assert {each.costs(Volume.PAPER) for each in named} <= plain


def test_dominance_is_strict_and_one_way() -> None:
    less, more = Costs(weight_flops=symbol("n").over_g()), Costs(weight_flops=symbol("n"))
    other = Costs(weight_bytes=symbol("d"))
    assert dominates(less, more)
    assert not dominates(more, less)
    assert not dominates(less, less)
    assert not dominates(less, other)


@pytest.mark.parametrize("gated", swept([False, True], [True]))
def test_every_step_on_the_front_obeys_the_algebra(*, gated: bool) -> None:
    for strategy in find_strategies(gated=gated, convention=Volume.TRAFFIC).front:
        _check(strategy)


def _check(strategy: Strategy) -> None:
    held = dict(strategy.layout)
    stream = R
    for step in strategy.steps:
        if isinstance(step, Move):
            assert (step.collective, step.before, step.after) in COLLECTIVES
            if step.weight:
                assert held[step.weight] is step.before
                held[step.weight] = step.after
                continue
        elif step.operation.weight:
            assert held[step.operation.weight] is step.weight
            assert PRODUCTS[step.before, held[step.operation.weight]] is step.after
        else:
            valid = {Kind.NORM: NORM_STATES, Kind.ACTIVATION: ACTIVATION_STATES, Kind.ATTENTION: ATTENTION_STATES}
            assert step.before is step.after
            assert step.before in valid.get(step.operation.kind, (step.before,))
        assert step.before is stream
        stream = step.after
    assert stream is R


@pytest.mark.parametrize("convention", Volume)
def test_an_all_reduce_moves_what_a_reduce_scatter_and_an_all_gather_move(convention: Volume) -> None:
    both = volume(Collective.REDUCE_SCATTER, convention) + volume(Collective.ALL_GATHER, convention)
    assert volume(Collective.ALL_REDUCE, convention) == both
    assert ring_steps(Collective.ALL_REDUCE, 4) == 2 * ring_steps(Collective.ALL_GATHER, 4)
    assert volume(Collective.ALL_GATHER, Volume.TRAFFIC).at(g=4) == constant(3).at() * constant(1).over_g().at(g=4)
