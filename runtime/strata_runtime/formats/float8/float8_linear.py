"""Linears whose weights are eight-bit floats (`fp8_e4m3` and `fp8_a8`)."""

import torch
from torch import Tensor

from strata_planner.contract.formats import FormatName
from strata_runtime.formats.float8.float8 import Float8Weight, quantize_float8
from strata_runtime.formats.kernels import FLOAT8_KERNELS, select
from strata_runtime.formats.quant_linear import QuantLinear
from strata_runtime.ranges import Range


class Float8Linear(QuantLinear):
    """Keeps float8 codes and float32 scales, whatever the compute type is."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        format_name: FormatName,
        compute_dtype: torch.dtype,
        columns: Range | None = None,
    ) -> None:
        """`columns`: the inputs that it has, of those that scales are of."""
        del compute_dtype  # activations bring it
        stored = quantize_float8(weight)
        if columns is not None:
            stored = Float8Weight(stored.codes[:, slice(*columns)].contiguous(), stored.scales)
        super().__init__((stored.codes.shape[0], stored.codes.shape[1]), format_name, bias)
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", stored.codes)
        self.register_buffer("scales", stored.scales)

    @property
    def stored(self) -> Float8Weight:
        return Float8Weight(self.codes, self.scales)

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(FLOAT8_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()
