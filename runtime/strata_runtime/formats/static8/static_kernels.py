"""Products with a StaticWeight (`w8a8_static`). Listed and chosen in `kernels`.

Like those of `w8a8` but that a token's scale is known before it comes: no pass over the activations looks for their largest.
"""

from torch import Tensor

from strata_runtime.formats import reference
from strata_runtime.formats.rounded import channel_kernels
from strata_runtime.formats.static8.static_weight import StaticWeight
from strata_runtime.kernels import native_channels


def native_runs(tokens: Tensor, weight: StaticWeight) -> bool:
    fits = tokens.dtype == weight.smoothing.dtype
    return fits and native_channels.takes(tokens, weight.codes) and native_channels.fast()


def native(tokens: Tensor, weight: StaticWeight) -> Tensor:
    """int8 x int8 with exact int32 sums, activations rounded in the same pass."""
    static = (weight.smoothing, weight.activation_scale)
    return native_channels.channel_linear(tokens, weight.codes, weight.scales, static)


def int_mm_runs(tokens: Tensor, weight: StaticWeight) -> bool:
    return channel_kernels.int8_sums_run(tokens, weight.codes)


def int_mm(tokens: Tensor, weight: StaticWeight) -> Tensor:
    """int8 x int8 with exact int32 sums."""
    codes, token_scales = reference.quantize_tokens_static(tokens, weight.smoothing, weight.activation_scale)
    return (channel_kernels.int8_sums(codes, weight.codes).float() * token_scales * weight.scales).to(tokens.dtype)


def reference_product(tokens: Tensor, weight: StaticWeight) -> Tensor:
    """What the format computes, in plain torch."""
    codes, token_scales = reference.quantize_tokens_static(tokens, weight.smoothing, weight.activation_scale)
    return (reference.multiply_codes(codes, weight.codes) * token_scales * weight.scales).to(tokens.dtype)
