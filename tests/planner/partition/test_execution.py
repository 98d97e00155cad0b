"""Sliced = whole: every strategy, run on simulated ranks, gives what one device gives."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.strategies import STRATEGIES, StrategyName
from strata_planner.partition.chain import WEIGHTS, Chain, WeightName, decoder_chain
from strata_planner.partition.naming import find_strategies
from strata_planner.partition.search import _START, _hops, _Place
from strata_planner.partition.states import COLLECTIVES, Collective, State, Volume, volume
from strata_planner.partition.strategy import Step, Strategy
from tests.laws import share, swept
from tests.planner.partition.ranks import Array, Shape, Tensor, run, whole_layer


@st.composite
def cases(draw: st.DrawFn, *, gated: bool | None = None) -> tuple[Shape, int, int]:
    """A shape, a number of ranks that divides its heads, a seed. Tokens, hidden and MLP width need not divide."""
    ranks = draw(st.integers(2, 4))
    kv_heads = ranks * draw(st.integers(1, 2))
    shape = Shape(
        tokens=draw(st.integers(1, 9)),
        hidden=draw(st.integers(2, 9)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        mlp=draw(st.integers(1, 9)),
        gated=draw(st.booleans()) if gated is None else gated,
    )
    return shape, ranks, draw(st.integers(0, 2**32 - 1))


def _same(
    strategy: Strategy, case: tuple[Shape, int, int], layout: dict[WeightName, State], *, residuals: bool
) -> None:
    shape, ranks, seed = case
    random = np.random.default_rng(seed)
    weights = shape.weights(random)
    hidden: Array = random.normal(size=(shape.tokens, shape.hidden))
    held = {name: Tensor.placed(weights[name], layout[name], shape.columns_of[name], ranks) for name in WEIGHTS}
    expected = whole_layer(shape, hidden, weights, residuals=residuals)
    np.testing.assert_allclose(
        run(strategy, shape, hidden, held), expected, rtol=1e-9, atol=1e-9, err_msg=str(strategy)
    )


@settings(max_examples=share(100), deadline=None)
@given(case=cases(), name=st.sampled_from(STRATEGIES))
def test_a_named_strategy_from_the_shared_layout_is_the_whole_layer(
    case: tuple[Shape, int, int], name: StrategyName
) -> None:
    found = find_strategies(gated=case[0].gated)
    _same(found.strategies[name], case, found.layout, residuals=True)


@pytest.mark.slow  # loading/test_strategies.py runs those that are chosen
@settings(max_examples=share(100, 50), deadline=None)
@given(case=cases(), place=st.integers(0, 10**6))
def test_a_strategy_on_the_front_is_the_whole_layer(case: tuple[Shape, int, int], place: int) -> None:
    front = find_strategies(gated=case[0].gated, convention=Volume.TRAFFIC).front
    strategy = front[place % len(front)]
    _same(strategy, case, strategy.layout, residuals=True)


@pytest.mark.slow  # the law above draws from the same front
@pytest.mark.parametrize("gated", [False, True])
def test_everything_on_the_front_is_the_whole_layer(gated: bool) -> None:  # noqa: FBT001
    case = (Shape(tokens=5, hidden=6, heads=6, kv_heads=3, head_dim=2, mlp=7, gated=gated), 3, 1)
    for convention in Volume:
        for strategy in find_strategies(gated=gated, convention=convention).front:
            _same(strategy, case, strategy.layout, residuals=True)


@pytest.mark.slow
@pytest.mark.parametrize("residuals", [False, True])
@pytest.mark.parametrize("gated", swept([False, True], [True]))
def test_sequences_off_the_front_are_the_whole_layer_too(*, gated: bool, residuals: bool) -> None:
    """Random walks through everything that backtracking would go through: the algebra's rules hold, not only its best uses."""
    case = (Shape(tokens=5, hidden=6, heads=6, kv_heads=3, head_dim=2, mlp=7, gated=gated), 3, 1)
    chain = decoder_chain(gated=gated, residuals=residuals)
    random = Random(7)
    for _ in range(150):
        strategy = _wander(chain, random)
        _same(strategy, case, strategy.layout, residuals=residuals)


@pytest.mark.parametrize(
    ("collective", "before", "after"), [rule for rule in COLLECTIVES if rule[1] is not State.LOCAL]
)
def test_a_devices_traffic_is_what_it_has_not_got(collective: Collective, before: State, after: State) -> None:
    """Of a tensor that all hold without sums, a device receives (and by symmetry sends) what it wants and does not hold."""
    ranks, rows, columns = 4, 8, 12
    whole: Array = np.arange(rows * columns, dtype=np.float64).reshape(rows, columns)
    had, wanted = (Tensor.placed(whole, state, (columns,), ranks) for state in (before, after))
    assert all(
        len(np.setdiff1d(want, have)) == volume(collective, Volume.TRAFFIC).value(g=ranks) * whole.size
        for have, want in zip(had.parts, wanted.parts, strict=True)
    )


def _wander(chain: Chain, random: Random) -> Strategy:
    """Begins again where it ends up with a stream that its residual cannot be added to."""
    steps: tuple[Step, ...] = ()
    place: _Place | None = _START
    while place is not None:
        onward = list(_hops(chain, place))
        hop, place = random.choice(onward) if onward else ((), _START)
        steps = (*steps, *hop) if onward else ()
    return Strategy(steps)
