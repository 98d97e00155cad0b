"""A linear of any precision (`any3` ... `any8`): bit-planes and a table of centroids, of which planes can be dropped and added while it lives.

Made from an any-precision parent, on the fly or from what `strata quantize` stored; its bits are changed by `loading.precision_switch`.
Any-Precision LLM, arXiv 2402.10517.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from strata_planner.contract.formats import ANY_PRECISION, FormatName
from strata_runtime.formats.errors import PrecisionError
from strata_runtime.formats.kernels import PLANE_KERNELS, Kernel, select
from strata_runtime.formats.planes import plane_kernels
from strata_runtime.formats.quant_linear import QuantLinear
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.kernels.native_calls import CHANGES, PLANES, PLANES_DECODED, PLANES_INT8, product


class AnyLinear(QuantLinear):
    """Takes planes and table without a copy, except of a tensor that is part of a larger one: what is let go must be memory of its own."""

    def __init__(self, weight: PlanesWeight, bias: Tensor | None, format_name: FormatName | None = None) -> None:
        """`format_name`: where it is not the format that follows from the number of planes."""
        super().__init__((weight.out_features, weight.in_features), format_name or ANY_PRECISION[weight.bits], bias)
        self._register(_alone(weight))

    @property
    def bits(self) -> int:
        return self.stored.bits

    @property
    def stored(self) -> PlanesWeight:
        if self._buffers["table"] is not self._stored.table:  # moved as modules are
            self._keep()
        return self._stored

    def with_bits(self, bits: int, table: Tensor, missing: Sequence[Tensor] = ()) -> PlanesWeight:
        """What `store` takes to become the model of `bits` bits: the planes held already are shared, `missing` follow them.

        table: [N, 2^bits]. Changes nothing. Raises PrecisionError for planes or a table that do not make `bits` bits of this weight.
        """
        held = self.stored
        planes = (*held.planes[:bits], *missing)
        shapes = {tuple(plane.shape) for plane in planes}
        if len(planes) != bits or shapes != {tuple(held.planes[0].shape)}:
            raise PrecisionError(
                f"{held.bits} planes {list(held.planes[0].shape)} and {[list(plane.shape) for plane in missing]} more do not make {bits} bits"
            )
        if tuple(table.shape) != (self.out_features, 1 << bits) or table.dtype != held.table.dtype:
            raise PrecisionError(
                f"table {table.dtype} {list(table.shape)} is not one of {bits} bits, {held.table.dtype} [{self.out_features}, {1 << bits}]"
            )
        return _alone(PlanesWeight(planes, table, self.in_features))

    def store(self, weight: PlanesWeight) -> PlanesWeight:
        """Multiply by this weight from now on; returns the one before, whose memory ends with the last who holds it.

        Not while a product is running.
        """
        before = self.stored
        for place in range(before.bits):
            del self._buffers[_name(place)]
        self._register(weight)
        self.format = ANY_PRECISION[weight.bits]
        return before

    def set_bits(self, bits: int, table: Tensor, missing: Sequence[Tensor] = ()) -> None:
        """Become the model of `bits` bits at once, in place: `with_bits`, then `store`."""
        self.store(self.with_bits(bits, table, missing))

    def multiply(self, tokens: Tensor) -> Tensor:
        stored, meant = self.stored, (tokens.shape[0], tokens.dtype)
        kernel = self._kernels.get(meant)
        if kernel is None:
            kernel = self._kernels[meant] = select(PLANE_KERNELS, self.format, tokens, stored)
        return kernel.run(tokens, stored)

    def native_product(self, tokens: int) -> bytes | None:
        stored = self.stored
        if tokens not in self._products:
            meant = stored.table.new_empty(tokens, self.in_features)
            kind = _NATIVE_KINDS.get(select(PLANE_KERNELS, self.format, meant, stored).run)
            if kind == PLANES_DECODED and not plane_kernels.decodes_itself(meant):
                kind = None
            if kind is not None and stored.table.dtype is torch.bfloat16:
                self._products[tokens] = product(kind, self.in_features, self.bias, stored.native.numbers)
            else:
                self._products[tokens] = None
        return self._products[tokens]

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()

    def _register(self, weight: PlanesWeight) -> None:
        self.register_buffer("table", weight.table)
        for place, plane in enumerate(weight.planes):
            self.register_buffer(_name(place), plane)
        self._keep()

    def _keep(self) -> None:
        """What a product takes from the buffers: to ask them each time takes longer than some products."""
        table = _tensor(self._buffers["table"])
        planes = tuple(_tensor(self._buffers[_name(place)]) for place in range(table.shape[1].bit_length() - 1))
        self._stored = PlanesWeight(planes, table, self.in_features)
        self._kernels: dict[tuple[int, torch.dtype], Kernel[PlanesWeight]] = {}  # by number and type of tokens
        self._products: dict[int, bytes | None] = {}  # by number of tokens
        CHANGES.happened()


_NATIVE_KINDS: dict[object, int] = {
    plane_kernels.native: PLANES,
    plane_kernels.native_int8: PLANES_INT8,
    plane_kernels.decoded: PLANES_DECODED,
}


def _name(place: int) -> str:
    return f"plane_{place}"


def _tensor(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer


def _alone(weight: PlanesWeight) -> PlanesWeight:
    """The same, each tensor in an allocation of its own."""
    return PlanesWeight(tuple(map(_own, weight.planes)), _own(weight.table), weight.in_features)


def _own(tensor: Tensor) -> Tensor:
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
