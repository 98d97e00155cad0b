"""Products with a Float8Weight or a BlockFloat8Weight (`fp8_*`). Listed and chosen in `kernels`.

`fp8_e4m3` and `fp8_block` decode some rows to the compute type and multiply; `fp8_a8` rounds activations to e4m3 too, with a scale per token, and multiplies
on the device's float8 units where it has them. Sums are float32 either way, so both paths of `fp8_a8` differ by the order of a sum alone.
"""

import torch
from torch import Tensor

from strata_runtime.formats import features
from strata_runtime.formats.float8.blocks import BlockFloat8Weight
from strata_runtime.formats.float8.float8 import Float8Weight, decode, quantize_float8
from strata_runtime.formats.pieces import multiply_in_pieces

WEIGHTS_AT_A_TIME = 1 << 20  # decoded at once: temporaries of 12 MB
WEIGHTS_AT_A_TIME_ON_CUDA = 1 << 26
SCALED_MM_QUANTUM = 16  # what its inputs and outputs must be multiples of


def converted(tokens: Tensor, weight: Float8Weight | BlockFloat8Weight) -> Tensor:
    """Some rows to the compute type, scales included, then a dense product: 16-bit activations on every device."""

    def rows(start: int, stop: int) -> Tensor:
        return weight.rows(start, stop).to(tokens.dtype)

    return multiply_in_pieces(tokens, (weight.out_features, weight.codes.shape[1]), _at_a_time(weight), rows)


def reference(tokens: Tensor, weight: Float8Weight) -> Tensor:
    """`fp8_a8` in plain torch: both sides float8, products exact and sums in float32, scaled, rounded once."""
    rounded = quantize_float8(tokens)
    codes = rounded.codes.float()  # keeps NaN

    def rows(start: int, stop: int) -> Tensor:
        return decode(weight.codes[start:stop])

    out = multiply_in_pieces(codes, (weight.out_features, weight.codes.shape[1]), _at_a_time(weight), rows)
    return out.mul_(rounded.scales[:, None]).mul_(weight.scales).to(tokens.dtype)


def scaled_mm_runs(tokens: Tensor, weight: Float8Weight) -> bool:
    """CUDA: torch's product of float8 on CPUs without such units takes 7 to 14 times as long as `reference`."""
    out_features, in_features = weight.codes.shape
    whole = out_features % SCALED_MM_QUANTUM == in_features % SCALED_MM_QUANTUM == 0 and tokens.shape[0] > 0
    return tokens.is_cuda and whole and features.scaled_mm(tokens.device)


def scaled_mm(tokens: Tensor, weight: Float8Weight) -> Tensor:
    """torch's product of float8 matrices, without the scales: CUDA's applies those of rows in bfloat16 only."""
    rounded = quantize_float8(tokens)
    one = torch.ones((), device=tokens.device)
    sums: Tensor = torch._scaled_mm(  # noqa: SLF001 -- torch names its kernels so
        rounded.codes, weight.codes.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
    )
    return sums.mul_(rounded.scales[:, None]).mul_(weight.scales).to(tokens.dtype)


def _at_a_time(weight: Float8Weight | BlockFloat8Weight) -> int:
    return WEIGHTS_AT_A_TIME_ON_CUDA if weight.codes.is_cuda else WEIGHTS_AT_A_TIME
