"""Linears whose weights are rounded to nearest: a scale per output (`int8`, `w8a8`), or a scale and zero per group (`int4`, `int3`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from strata_planner.contract.formats import WHOLE_ROW_VALUES, FormatName
from strata_runtime.formats.kernels import CHANNEL_KERNELS, GROUP_KERNELS, select
from strata_runtime.formats.quant_linear import NamedProducts, QuantLinear
from strata_runtime.formats.quantizers import quantize_channels
from strata_runtime.formats.rounded import channel_kernels
from strata_runtime.formats.weights import ChannelWeight, GroupWeight, store_groups
from strata_runtime.kernels import native_dense
from strata_runtime.kernels.native_channels import channel_product
from strata_runtime.ranges import Range


class ChannelLinear(QuantLinear):
    """Formats `int8` and `w8a8`."""

    def __init__(self, stored: ChannelWeight, bias: Tensor | None, format_name: FormatName) -> None:
        super().__init__((stored.codes.shape[0], stored.codes.shape[1]), format_name, bias)
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", stored.codes)
        self.register_buffer("scales", stored.scales)
        self._named = NamedProducts()

    @property
    def stored(self) -> ChannelWeight:
        return ChannelWeight(self.codes, self.scales)

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(CHANNEL_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def native_product(self, tokens: int) -> bytes | None:
        def named(rows: Tensor) -> bytes | None:
            if select(CHANNEL_KERNELS, self.format, rows, self.stored).run is not channel_kernels.native:
                return None
            return channel_product(self.codes, self.scales, self.bias)

        return self._named.of(self.codes, tokens, named)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()


class WholeRowLinear(ChannelLinear):
    """Format `w8a8` of some inputs alone, where tokens are rounded by the largest magnitude of their whole rows: other ranks tell that of theirs.

    Rows get more values, as large as the largest one, which are multiplied by zeros: so they are rounded as whole rows are, by the same kernels.
    """

    def __init__(self, stored: ChannelWeight, bias: Tensor | None) -> None:
        codes = torch.nn.functional.pad(stored.codes, (0, WHOLE_ROW_VALUES))
        super().__init__(ChannelWeight(codes, stored.scales), bias, "w8a8")
        self.largest: Callable[[Tensor], Tensor] | None = (
            None  # of rows, over all ranks: magnitudes [rows, 1] -> [rows, 1]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.largest is not None, "nobody tells it of the other ranks"
        rows = inputs.reshape(-1, inputs.shape[-1])
        peaks = self.largest(rows.abs().amax(1, keepdim=True))
        out = super().forward(torch.cat((rows, peaks.expand(-1, WHOLE_ROW_VALUES)), dim=1))
        return out.view(*inputs.shape[:-1], self.out_features)

    def native_product(self, tokens: int) -> bytes | None:  # noqa: ARG002
        """None: other ranks are asked before it multiplies."""
        return None


class PackedChannelLinear(QuantLinear):
    """Format `int8` in the layout of the native library, whose blocks the weight must fill: see `packs`."""

    def __init__(self, stored: ChannelWeight | native_dense.PackedWeight, bias: Tensor | None) -> None:
        packed = (
            stored if isinstance(stored, native_dense.PackedWeight) else native_dense.pack(stored.codes, stored.scales)
        )
        super().__init__((packed.out_features, packed.in_features), "int8", bias)
        self._packed = packed
        self._product = native_dense.PackedProduct(self._packed, bias)
        self.register_buffer("codes", self._packed.values)
        self.register_buffer("scales", self._packed.scales)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._product(inputs)

    def native_product(self, tokens: int) -> bytes | None:  # noqa: ARG002
        return self._product.numbers

    @property
    def stored(self) -> ChannelWeight:
        """The codes in their own order."""
        assert self._packed.scales is not None
        return ChannelWeight(native_dense.rows(self._packed, torch.arange(self.out_features)), self._packed.scales)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()


def packs(weight: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether the native library multiplies a weight's codes in its own layout, without a byte more than they have."""
    return native_dense.takes(compute_dtype, weight.device) and native_dense.fills_blocks(weight)


def channel_weight(weight: Tensor, format_name: FormatName, compute_dtype: torch.dtype) -> ChannelWeight:
    """A weight [N, K] rounded to 8 bits with a scale per output."""
    rounded = quantize_channels(weight, torch.float32 if format_name == "w8a8" else compute_dtype)
    return ChannelWeight(rounded.codes, rounded.scales)


def channel_linear(
    weight: Tensor,
    bias: Tensor | None,
    format_name: FormatName,
    compute_dtype: torch.dtype,
    columns: Range | None = None,
) -> ChannelLinear | PackedChannelLinear:
    """A linear of `int8` or `w8a8` as its processor multiplies it fastest. `columns`: the inputs that it has, of those that scales are of."""
    stored = channel_weight(weight, format_name, compute_dtype)
    if columns is not None:
        stored = stored.part(columns)
    if format_name == "w8a8" and columns is not None:
        return WholeRowLinear(stored, bias)
    if format_name == "int8" and packs(stored.codes, compute_dtype):
        return PackedChannelLinear(stored, bias)
    return ChannelLinear(stored, bias, format_name)


class GroupLinear(QuantLinear):
    """Formats `int4` and `int3`."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        format_name: FormatName,
        compute_dtype: torch.dtype,
        inputs: Range | None = None,
    ) -> None:
        """`inputs`: those that it has, of all that the weight is rounded with."""
        stored = store_groups(weight, format_name, compute_dtype, inputs)
        super().__init__((weight.shape[0], stored.in_features), format_name, bias)
        self.columns = stored.columns
        self.plane_names = tuple(f"plane_{index}" for index in range(len(stored.planes)))
        for name, plane in zip(self.plane_names, stored.planes, strict=True):
            self.register_buffer(name, plane)
        self.scales_and_zeros: Tensor
        self.register_buffer("scales_and_zeros", stored.scales_and_zeros)

    @property
    def stored(self) -> GroupWeight:
        planes = tuple(self.get_buffer(name) for name in self.plane_names)
        return GroupWeight(planes, self.scales_and_zeros, self.in_features, self.columns)

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(GROUP_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()
