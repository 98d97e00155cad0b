"""The algebra of tensor states: what a tensor is on each device of a group, and what may be done with it in that state.

DynPart (EECS-2024-108, chapter 3) rule for rule. Read by the search, which tries everything that stands here, and by the
costs of collectives. Rows are tokens (of a weight: inputs), columns are hidden values (of a weight: outputs).
"""

from enum import StrEnum

from strata_planner.partition.polynomial import Polynomial, constant


class State(StrEnum):
    """Where the parts of a tensor are."""

    REPLICATED = "R"  # the whole tensor on every device
    COLUMNS = "CS"  # an equal share of the columns on each
    ROWS = "RS"  # an equal share of the rows on each
    LOCAL = "L"  # the full shape on each; the tensor is their sum


class Collective(StrEnum):
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"


R, CS, RS, L = State.REPLICATED, State.COLUMNS, State.ROWS, State.LOCAL

# (activation, weight) -> product
PRODUCTS: dict[tuple[State, State], State] = {(CS, RS): L, (R, CS): CS, (RS, R): RS, (R, R): R}
ACTIVATION_STATES = (R, RS, CS)  # element by element
NORM_STATES = (R, RS)  # along a row
ATTENTION_STATES = (CS, R)  # columns are whole heads

COLLECTIVES: tuple[tuple[Collective, State, State], ...] = (
    (Collective.ALL_GATHER, CS, R),
    (Collective.ALL_GATHER, RS, R),
    (Collective.REDUCE_SCATTER, L, CS),
    (Collective.REDUCE_SCATTER, L, RS),
    (Collective.ALL_REDUCE, L, R),
    (Collective.ALL_TO_ALL, RS, CS),
    (Collective.ALL_TO_ALL, CS, RS),
)


def can_add(stream: State, residual: State) -> bool:
    """Whether a residual can be added where it lies. A replicated one is cut, or added to one device's partial sums."""
    return residual in {R, stream}


class Volume(StrEnum):
    """How a collective's volume is counted, in tensors of the full size."""

    PAPER = "paper"  # DynPart, table 4.1: an all-reduce twice, everything else once
    TRAFFIC = "traffic"  # what one device sends: (g-1)/g of it, of an all-to-all (g-1)/g of its own share


def volume(collective: Collective, convention: Volume) -> Polynomial:
    """Tensors of the full size that count as moved."""
    times = 2 if collective is Collective.ALL_REDUCE else 1
    if convention is Volume.PAPER:
        return constant(times)
    sent = constant(1) - constant(1).over_g()
    return sent.over_g() if collective is Collective.ALL_TO_ALL else times * sent


def ring_steps(collective: Collective, degree: int) -> int:
    """Messages that each device sends one after the other."""
    return (2 if collective is Collective.ALL_REDUCE else 1) * (degree - 1)
