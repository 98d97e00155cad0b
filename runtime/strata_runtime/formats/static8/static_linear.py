"""A linear whose activations are rounded by scales known beforehand (`w8a8_static`).

`static_linear` is called by the loader with the linear's entry of the model's calibration (`activation_file`): a weight alone does not say how its
inputs are to be rounded, so `make_linear` cannot make one.
"""

import torch
from torch import Tensor

from strata_runtime.formats.errors import NotCalibratedError
from strata_runtime.formats.kernels import STATIC_KERNELS, select
from strata_runtime.formats.linear import check_weight
from strata_runtime.formats.quant_linear import NamedProducts, QuantLinear
from strata_runtime.formats.static8 import static_kernels
from strata_runtime.formats.static8.activation_file import ActivationEntry
from strata_runtime.formats.static8.static_weight import StaticWeight, quantize_static
from strata_runtime.kernels.native_channels import channel_product
from strata_runtime.ranges import Range


class StaticLinear(QuantLinear):
    """Format `w8a8_static`."""

    def __init__(self, stored: StaticWeight, bias: Tensor | None) -> None:
        super().__init__((stored.codes.shape[0], stored.codes.shape[1]), "w8a8_static", bias)
        self.codes: Tensor
        self.scales: Tensor
        self.smoothing: Tensor
        self.activation_scale: Tensor
        for name in ("codes", "scales", "smoothing", "activation_scale"):
            self.register_buffer(name, getattr(stored, name))
        self._named = NamedProducts()

    @property
    def stored(self) -> StaticWeight:
        return StaticWeight(self.codes, self.scales, self.smoothing, self.activation_scale)

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(STATIC_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def native_product(self, tokens: int) -> bytes | None:
        def named(rows: Tensor) -> bytes | None:
            if select(STATIC_KERNELS, self.format, rows, self.stored).run is not static_kernels.native:
                return None
            return channel_product(self.codes, self.scales, self.bias, (self.smoothing, self.activation_scale))

        return self._named.of(self.codes, tokens, named)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()


def static_linear(
    weight: Tensor,
    bias: Tensor | None,
    entry: ActivationEntry,
    compute_dtype: torch.dtype,
    *,
    name: str = "linear",
    columns: Range | None = None,
) -> StaticLinear:
    """As `make_linear`, with what calibration says of this linear's inputs.

    weight: [N, K], bias: [N] or None, on the device where the module will live. Raises what `make_linear` raises, and NotCalibratedError for an
    entry of another number of inputs.
    """
    check_weight(weight, bias, "w8a8_static", compute_dtype, name)
    if entry.smoothing.shape != weight.shape[1:]:
        raise NotCalibratedError(
            f"{name}: the calibration has {entry.smoothing.shape[0]} inputs, the weight {weight.shape[1]}: calibrate this model again"
        )
    stored = quantize_static(weight.detach(), entry.smoothing, entry.scale, compute_dtype)
    if columns is not None:
        stored = stored.part(columns)
    return StaticLinear(stored, None if bias is None else bias.detach().to(compute_dtype))
