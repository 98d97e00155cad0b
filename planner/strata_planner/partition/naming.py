"""The strategies that the runtime runs, picked out of what the search found, and the one weight layout that serves them all.

Source: DynPart (EECS-2024-108), sections 4.3 to 5.1. Nothing here says how a strategy goes: only by which products it is known.
A name is given to strategies on the front; if the algebra or the search were wrong, there would be none to give it to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from strata_planner.contract.strategies import STRATEGIES, StrategyName
from strata_planner.partition.chain import WEIGHTS, Chain, WeightName, decoder_chain
from strata_planner.partition.polynomial import Polynomial
from strata_planner.partition.search import pareto_front
from strata_planner.partition.states import CS, RS, R, State, Volume
from strata_planner.partition.strategy import Strategy, layout_bytes

# What is multiplied with what: the states of activation and weight, and whether the weight is brought for each pass.
_SLICED_ATTENTION = {"qkv": (R, CS, False), "w0": (CS, RS, False)}
_REPLICATED_PROJECTION = {"qkv": (R, CS, False), "w0": (R, R, False)}
_SLICED_MLP = {"w1": (R, CS, False), "w2": (CS, RS, False)}
_GATHERED_MLP = {"w1": (RS, R, True), "w2": (RS, R, True)}
_MARKS: dict[StrategyName, dict[str, tuple[State, State, bool]]] = {
    "megatron": _SLICED_ATTENTION | _SLICED_MLP,
    "projection-replicated": _REPLICATED_PROJECTION | _SLICED_MLP,
    "weight-gathered": _SLICED_ATTENTION | _GATHERED_MLP,
}

Layout = dict[WeightName, State]


def recognised(strategy: Strategy) -> StrategyName | None:
    """The name of a strategy's structure, if it has one."""
    layout = strategy.layout
    marks = {name: (*states, layout[name] is not states[1]) for name, states in strategy.products.items()}
    return next((name for name, known in _MARKS.items() if known == marks), None)


@dataclass(frozen=True)
class Found:
    """What a search gave for one kind of layer. `strategies` lie in `layout`, without moving a weight between passes."""

    chain: Chain
    front: tuple[Strategy, ...]
    strategies: dict[StrategyName, Strategy]
    layout: Layout

    @property
    def layout_bytes(self) -> Polynomial:
        return layout_bytes(self.chain.operations, self.layout)

    def fits(self, strategy: Strategy) -> bool:
        """Whether the strategy runs from the layout's weights."""
        return serves(self.layout, strategy.layout)


@cache
def find_strategies(*, gated: bool, convention: Volume = Volume.PAPER) -> Found:
    """Searches a layer once per process (a fifth of a second) and names what it finds.

    Raises LookupError where a name has no strategy on the front: then algebra and paper part.
    """
    chain = decoder_chain(gated=gated)
    front = pareto_front(chain, convention)
    named = [[each for each in front if recognised(each) == name] for name in STRATEGIES]
    missing = [name for name, members in zip(STRATEGIES, named, strict=True) if not members]
    if missing:
        raise LookupError(f"no strategy on the front is {', '.join(missing)}; states.py has lost a rule of the algebra")
    chosen, layout = shared_layout(chain, named)
    return Found(chain, front, dict(zip(STRATEGIES, chosen, strict=True)), layout)


def serves(held: Layout, wanted: Layout) -> bool:
    """Whether weights held like this can be used as if held like that: as they are, or by a view of a replicated one."""
    return all(held[name] in {wanted[name], R} for name in WEIGHTS)


def shared_layout(chain: Chain, named: Sequence[Sequence[Strategy]]) -> tuple[tuple[Strategy, ...], Layout]:
    """One member of each group and the smallest layout that serves them all without moving a weight.

    The groups' members cost the same and hold weights differently (a weight that is gathered may lie in columns or rows).
    A weight wanted in two states is replicated: each state is a view of it.
    """
    sizes = {"d": 4096.0, "q": 4096.0, "k": 1024.0, "m": 11008.0, "g": 4.0}

    def held(members: Sequence[Strategy]) -> Polynomial:
        return layout_bytes(chain.operations, _union(members))

    chosen = min(product(*named), key=lambda members: (held(members).value(**sizes), *map(_rows, members)))
    return chosen, _union(chosen)


def _union(members: Iterable[Strategy]) -> Layout:
    wanted = [member.layout for member in members]
    states = {name: {layout[name] for layout in wanted} for name in WEIGHTS}
    return {name: next(iter(each)) if len(each) == 1 else R for name, each in states.items()}


def _rows(strategy: Strategy) -> int:
    return sum(state is RS for state in strategy.layout.values())
