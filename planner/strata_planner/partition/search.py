"""PartitionSearch: every valid way to cut a layer, and the ways that no other beats, for all lengths and sizes at once.

Source: DynPart (EECS-2024-108), chapters 3 and 4. `sequences` backtracks over the algebra of `states` and gives every valid
strategy. `pareto_front` takes the same ways but keeps, behind each prefix's state, only suffixes that none dominates: costs are
sums over steps and what follows depends on the state alone, so the front is the one of all sequences. Strategies of equal cost
stay side by side where they hold weights differently; where they do not, the one of fewer steps stays.

Dominated: no cost is smaller for any n, d, m, k, q >= k, g >= 2, and one is larger for some (`polynomial.is_never_negative`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

from strata_planner.partition.chain import Chain, Kind, N, Operation
from strata_planner.partition.polynomial import is_never_negative
from strata_planner.partition.states import (
    ACTIVATION_STATES,
    ATTENTION_STATES,
    COLLECTIVES,
    CS,
    NORM_STATES,
    PRODUCTS,
    RS,
    Collective,
    R,
    State,
    Volume,
    can_add,
)
from strata_planner.partition.strategy import Apply, Costs, Move, Step, Strategy, step_costs

Transition = tuple[Collective, State, State]


@dataclass(frozen=True)
class _Place:
    """Before operation `index`: the state of the stream, and of the residual (where the last norm read it)."""

    index: int
    stream: State
    residual: State


_START = _Place(0, R, R)


def sequences(chain: Chain) -> Iterator[Strategy]:
    """Every valid strategy. Between two operations a tensor never returns to a state that it was in."""

    def extend(place: _Place) -> Iterator[tuple[Step, ...]]:
        for steps, following in _hops(chain, place):
            if following is None:
                yield steps
            else:
                yield from ((*steps, *rest) for rest in extend(following))

    return (Strategy(steps) for steps in extend(_START))


def count_sequences(chain: Chain) -> int:
    """How many `sequences` gives, without walking through them."""

    @cache
    def ways(place: _Place) -> int:
        return sum(1 if following is None else ways(following) for _, following in _hops(chain, place))

    return ways(_START)


def pareto_front(chain: Chain, convention: Volume) -> tuple[Strategy, ...]:
    """The strategies that no other dominates, fewest weight bytes first."""

    @cache
    def best(place: _Place) -> tuple[_Partial, ...]:
        found = []
        for steps, following in _hops(chain, place):
            head = _Partial.of(steps, convention)
            found += [head.then(rest) for rest in best(following)] if following else [head]
        return _not_dominated(found)

    return tuple(sorted((Strategy(each.steps) for each in best(_START)), key=_order(convention)))


def dominates(better: Costs, worse: Costs) -> bool:
    """At most as much of everything, for all sizes, and not the same."""
    if better == worse or any(less > more for less, more in zip(better.samples, worse.samples, strict=True)):
        return False
    return all(is_never_negative(more - less) for less, more in zip(better.objectives, worse.objectives, strict=True))


@dataclass(frozen=True)
class _Partial:
    """The rest of a layer from some place on."""

    steps: tuple[Step, ...]
    costs: Costs
    layout: tuple[State, ...]  # of the weights that these steps use, in their order

    @classmethod
    def of(cls, steps: tuple[Step, ...], convention: Volume) -> "_Partial":
        layout = Strategy(steps).layout
        costs = sum((step_costs(step, layout, convention) for step in steps), Costs())
        return cls(steps, costs, tuple(layout.values()))

    def then(self, rest: "_Partial") -> "_Partial":
        return _Partial((*self.steps, *rest.steps), self.costs + rest.costs, (*self.layout, *rest.layout))


def _not_dominated(candidates: Iterable[_Partial]) -> tuple[_Partial, ...]:
    shortest: dict[tuple[Costs, tuple[State, ...]], _Partial] = {}
    for each in candidates:
        key = (each.costs, each.layout)
        if key not in shortest or len(each.steps) < len(shortest[key].steps):
            shortest[key] = each
    kept: list[Costs] = []
    for costs in sorted({each.costs for each in shortest.values()}, key=attrgetter("samples")):
        if not any(dominates(other, costs) for other in kept):  # who dominates comes first
            kept.append(costs)
    survivors = set(kept)
    return tuple(each for each in shortest.values() if each.costs in survivors)


def _hops(chain: Chain, place: _Place) -> Iterator[tuple[tuple[Step, ...], _Place | None]]:
    """Collectives, then the next operation; behind the last operation, collectives back to a replicated tensor."""
    behind = place.index == len(chain.operations)
    elements = N * (chain.operations[0].inputs if behind else chain.operations[place.index].inputs)
    for moves in paths(place.stream):
        stream = moves[-1][2] if moves else place.stream
        steps = tuple(Move(*move, elements) for move in moves)
        if behind:
            if stream is R:
                yield steps, None
            continue
        operation = chain.operations[place.index]
        for applied, after in _applications(operation, stream, place.residual):
            residual = stream if operation.kind is Kind.NORM else place.residual
            yield (*steps, *applied), _Place(place.index + 1, after, residual)


def _applications(operation: Operation, stream: State, residual: State) -> Iterator[tuple[tuple[Step, ...], State]]:
    """The operation on a stream in this state, for a product with every way to hold and bring its weight."""
    if operation.kind is not Kind.MATMUL:
        if _RULES[operation.kind](stream, residual):
            yield (Apply(operation, stream, stream),), stream
        return
    for held in (CS, RS, R):
        for moves in paths(held):
            used = moves[-1][2] if moves else held
            after = PRODUCTS.get((stream, used))
            if after is not None:
                gathered = tuple(Move(*move, operation.weight_elements, operation.weight) for move in moves)
                yield (*gathered, Apply(operation, stream, after, used)), after


_RULES: dict[Kind, Callable[[State, State], bool]] = {
    Kind.NORM: lambda stream, _: stream in NORM_STATES,
    Kind.ACTIVATION: lambda stream, _: stream in ACTIVATION_STATES,
    Kind.ATTENTION: lambda stream, _: stream in ATTENTION_STATES,
    Kind.ADD: can_add,
}


@cache
def paths(start: State) -> tuple[tuple[Transition, ...], ...]:
    """All chains of collectives from a state that visit no state twice, the empty one first."""

    def extend(state: State, seen: frozenset[State]) -> Iterator[tuple[Transition, ...]]:
        yield ()
        for move in COLLECTIVES:
            if move[1] is state and move[2] not in seen:
                yield from ((move, *rest) for rest in extend(move[2], seen | {move[2]}))

    return tuple(extend(start, frozenset({start})))


def _order(convention: Volume) -> Callable[[Strategy], tuple[float, ...]]:
    """By memory, then communication, of a layer of middling size: only to print in a stable order."""
    sizes = {"n": 4096.0, "d": 4096.0, "q": 4096.0, "k": 4096.0, "m": 11008.0, "g": 4.0}

    def key(strategy: Strategy) -> tuple[float, ...]:
        costs = strategy.costs(convention)
        values = (costs.weight_bytes, costs.communication_bytes, costs.weight_flops, costs.attention_flops)
        return (*(round(each.value(**sizes)) for each in values), len(strategy.steps))

    return key
