"""A linear of any precision (`any3` ... `any8`): bit-planes and a table of centroids, of which planes can be dropped and added while it lives.

Made from an any-precision parent, on the fly or from what `strata quantize` stored. Any-Precision LLM, arXiv 2402.10517.
"""

from collections.abc import Sequence

from torch import Tensor

from strata_planner.contract.formats import ANY_PRECISION
from strata_runtime.precision.kernels import PLANE_KERNELS, select
from strata_runtime.precision.quant_linear import QuantLinear
from strata_runtime.precision.weights import PlanesWeight


class AnyLinear(QuantLinear):
    """Takes the planes and the table as they are; its format follows from their number."""

    def __init__(self, weight: PlanesWeight, bias: Tensor | None) -> None:
        super().__init__((weight.out_features, weight.in_features), ANY_PRECISION[weight.bits], bias)
        self.table: Tensor
        self.register_buffer("table", weight.table)
        for place, plane in enumerate(weight.planes):
            self.register_buffer(_name(place), plane)

    @property
    def bits(self) -> int:
        return self.stored.bits

    @property
    def stored(self) -> PlanesWeight:
        count = self.table.shape[1].bit_length() - 1
        return PlanesWeight(
            tuple(self.get_buffer(_name(place)) for place in range(count)), self.table, self.in_features
        )

    def set_bits(self, bits: int, table: Tensor, missing: Sequence[Tensor] = ()) -> None:
        """Become the model of `bits` bits, in place: planes beyond it are let go, `missing` are those that follow the present ones.

        table: [N, 2^bits]. Not while a product is running.
        """
        held = self.stored.planes
        planes = (*held[:bits], *missing)
        assert len(planes) == bits, f"{len(held)} planes and {len(missing)} more do not make {bits}"
        assert table.shape == (self.out_features, 1 << bits), f"table {list(table.shape)} is not one of {bits} bits"
        for place in range(len(held)):
            delattr(self, _name(place))
        for place, plane in enumerate(planes):
            self.register_buffer(_name(place), plane)
        self.table = table
        self.format = ANY_PRECISION[bits]

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(PLANE_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()


def _name(place: int) -> str:
    return f"plane_{place}"
