"""A strategy: one valid way through a layer, step by step, and what it costs in symbols.

Made by the search; read by whoever names, prices or runs strategies. A step either moves a tensor by a collective or does an
operation on tensors in given states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

from strata_planner.partition.chain import WEIGHTS, Kind, N, Operation, WeightName
from strata_planner.partition.polynomial import Polynomial, constant
from strata_planner.partition.states import CS, Collective, R, State, Volume, volume

ZERO = constant(0)
# Bytes of a weight or an activation where costs are symbols (DynPart: half precision).
ITEM_BYTES = 2


@dataclass(frozen=True)
class Move:
    """A collective on the activation (`weight` None) or on a weight; `elements`: of the whole tensor."""

    collective: Collective
    before: State
    after: State
    elements: Polynomial
    weight: WeightName | None = None

    def bytes_moved(self, convention: Volume) -> Polynomial:
        return ITEM_BYTES * volume(self.collective, convention) * self.elements

    def __str__(self) -> str:
        return f"{self.collective} {self.weight or 'activation'} {self.before}->{self.after}"


@dataclass(frozen=True)
class Apply:
    """An operation: activation in state `before`, its weight (if any) in state `weight`, the result in state `after`."""

    operation: Operation
    before: State
    after: State
    weight: State | None = None

    @property
    def weight_flops(self) -> Polynomial:
        """Of a product, on one device."""
        whole = 2 * N * self.operation.weight_elements
        return whole if (self.before, self.weight) == (R, R) else whole.over_g()

    @property
    def attention_flops(self) -> Polynomial:
        """Of causal attention, on one device: half of n x n scores, times queries and values."""
        if self.operation.kind is not Kind.ATTENTION:
            return ZERO
        whole = 2 * N * N * self.operation.width
        return whole.over_g() if self.before is CS else whole

    def __str__(self) -> str:
        name = self.operation.weight or self.operation.kind
        return f"{self.before}@{name}:{self.weight}={self.after}" if self.weight else f"{name} {self.after}"


Step = Move | Apply

# Powers of two, so that floats are exact. Short and long inputs, narrow and wide layers, small and large groups.
_SAMPLES: tuple[dict[str, float], ...] = (
    {"n": 1, "d": 2**12, "q": 2**12, "k": 2**12, "m": 2**14, "g": 2},
    {"n": 2**20, "d": 2**10, "q": 2**11, "k": 2**5, "m": 2**9, "g": 2},
    {"n": 2**8, "d": 2**9, "q": 2**14, "k": 2**6, "m": 2**10, "g": 2**10},
    {"n": 2**12, "d": 2**13, "q": 2**9, "k": 2**9, "m": 2**6, "g": 2**3},
)


@dataclass(frozen=True)
class Costs:
    """Of one layer and one pass, on one device: what the front compares."""

    weight_flops: Polynomial = ZERO
    attention_flops: Polynomial = ZERO
    communication_bytes: Polynomial = ZERO
    weight_bytes: Polynomial = ZERO  # held, whether a pass runs or not

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(*map(add, self.objectives, other.objectives))

    @property
    def objectives(self) -> tuple[Polynomial, Polynomial, Polynomial, Polynomial]:
        return self.weight_flops, self.attention_flops, self.communication_bytes, self.weight_bytes

    @cached_property
    def samples(self) -> tuple[float, ...]:
        """The costs at a few sizes: a quick no to whether one dominates another."""
        return tuple(each.value(**sizes) for each in self.objectives for sizes in _SAMPLES)

    def at(self, **values: int) -> "Costs":
        return Costs(*(each.at(**values) for each in self.objectives))


@dataclass(frozen=True)
class Strategy:
    """All steps of one layer, from a replicated input to a replicated output."""

    steps: tuple[Step, ...]

    @property
    def applications(self) -> Iterator[Apply]:
        return (step for step in self.steps if isinstance(step, Apply))

    @property
    def moves(self) -> Iterator[Move]:
        return (step for step in self.steps if isinstance(step, Move))

    @property
    def products(self) -> dict[WeightName, tuple[State, State]]:
        """Weight -> the states of the activation and of the weight that are multiplied: the structure of the strategy."""
        return {
            step.operation.weight: (step.before, step.weight)
            for step in self.applications
            if step.operation.weight and step.weight
        }

    @property
    def layout(self) -> dict[WeightName, State]:
        """Weight -> the state that it is held in between passes."""
        moved: dict[WeightName, State] = {}
        for move in self.moves:
            if move.weight:
                moved.setdefault(move.weight, move.before)
        return {name: moved.get(name, used) for name, (_, used) in self.products.items()}

    def costs(self, convention: Volume) -> Costs:
        layout = self.layout
        return reduce(add, (step_costs(step, layout, convention) for step in self.steps), Costs())

    def __str__(self) -> str:
        layout = self.layout
        parts = [
            f"{name} {activation}@{used}" + (f"(from {layout[name]})" if layout[name] is not used else "")
            for name, (activation, used) in self.products.items()
        ]
        return ", ".join(parts)


def step_costs(step: Step, layout: dict[WeightName, State], convention: Volume) -> Costs:
    """A weight's bytes are counted where it is multiplied, in the state that `layout` holds it in."""
    if isinstance(step, Move):
        return Costs(communication_bytes=step.bytes_moved(convention))
    weight = step.operation.weight
    held = held_bytes(step.operation, layout[weight]) if weight else ZERO
    return Costs(step.weight_flops, step.attention_flops, ZERO, held)


def held_bytes(operation: Operation, state: State) -> Polynomial:
    """Of the operation's weight on one device."""
    whole = ITEM_BYTES * operation.weight_elements
    return whole if state is R else whole.over_g()


def layout_bytes(operations: tuple[Operation, ...], layout: dict[WeightName, State]) -> Polynomial:
    """Of all weights of a layer on one device."""
    held = (held_bytes(each, layout[each.weight]) for each in operations if each.weight in WEIGHTS and each.weight)
    return reduce(add, held, ZERO)
