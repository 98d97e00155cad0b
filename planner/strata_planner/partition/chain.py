"""A decoder layer as the chain of operations that the search cuts: Act(LN(Attn(LN(A) QKV) W0) W1) W2 with its two residuals.

Source: DynPart (EECS-2024-108), chapter 3, which leaves the residuals out; here they are in, as a real layer adds them. OPT's
MLP has one first matrix, a gated one (Llama) two of the same width, cut alike so that the gate meets its own columns. Grouped
queries make keys and values narrower (k < q). Sizes are symbols; `sizes_of` gives a real layer's numbers.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from strata_planner.errors import ModelError
from strata_planner.partition.polynomial import Polynomial, constant, symbol
from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape

WeightName = Literal["qkv", "w0", "w1", "w2"]
WEIGHTS: tuple[WeightName, ...] = ("qkv", "w0", "w1", "w2")

N, D, Q, K, M = (symbol(name) for name in "ndqkm")


class Kind(StrEnum):
    NORM = "norm"
    MATMUL = "matmul"
    ATTENTION = "attention"
    ACTIVATION = "activation"
    ADD = "add"


@dataclass(frozen=True)
class Operation:
    """`width`: columns of what comes out. `inputs`: columns of what goes in, for a product the rows of its weight."""

    kind: Kind
    inputs: Polynomial
    width: Polynomial
    weight: WeightName | None = None

    @property
    def weight_elements(self) -> Polynomial:
        return self.inputs * self.width if self.weight else constant(0)


@dataclass(frozen=True)
class Chain:
    operations: tuple[Operation, ...]
    gated: bool


def decoder_chain(*, gated: bool, residuals: bool = True) -> Chain:
    """OPT's layer, or Llama's where `gated`. Without residuals: the paper's formula to the letter."""
    first = 2 * M if gated else M
    qkv = Q + 2 * K
    add = (Operation(Kind.ADD, D, D),) if residuals else ()
    operations = (
        Operation(Kind.NORM, D, D),
        Operation(Kind.MATMUL, D, qkv, "qkv"),
        Operation(Kind.ATTENTION, qkv, Q),
        Operation(Kind.MATMUL, Q, D, "w0"),
        *add,
        Operation(Kind.NORM, D, D),
        Operation(Kind.MATMUL, D, first, "w1"),
        Operation(Kind.ACTIVATION, first, M),
        Operation(Kind.MATMUL, M, D, "w2"),
        *add,
    )
    return Chain(operations, gated)


_WEIGHT_OF: dict[str, WeightName] = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "qkv_proj": "qkv",
    "o_proj": "w0",
    "gate_proj": "w1",
    "up_proj": "w1",
    "gate_up_proj": "w1",
    "down_proj": "w2",
}


def linears_of(layer: LayerShape) -> dict[WeightName, tuple[Linear, ...]]:
    """Which linears of a real layer are which weight of the chain. Raises ModelError for a layer of experts."""
    unknown = [linear.name for linear in layer.linears if linear.name not in _WEIGHT_OF]
    if unknown:
        raise ModelError(
            f"tensor partition knows one MLP per layer; {', '.join(unknown)} are experts: such layers run Megatron's cut"
        )
    return {
        weight: tuple(linear for linear in layer.linears if _WEIGHT_OF[linear.name] == weight) for weight in WEIGHTS
    }


def is_gated(layer: LayerShape) -> bool:
    """Two first matrices, whether stored apart or as one."""
    linears = linears_of(layer)
    return sum(each.out_features for each in linears["w1"]) == 2 * linears["w2"][0].in_features


def sizes_of(layer: LayerShape, hidden_size: int) -> dict[str, int]:
    """The symbols' values for a real layer, without n and g."""
    return {
        "d": hidden_size,
        "q": layer.heads * layer.head_dim,
        "k": layer.kv_heads * layer.head_dim,
        "m": linears_of(layer)["w2"][0].in_features,
    }
