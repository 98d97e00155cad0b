"""Products with a ChannelWeight (`int8`, `w8a8`). Listed and chosen in `kernels`; each is tested against `reference`.

`int8` here is integer weights times 16-bit activations: codes are exact in every compute type, the scale of an output is applied to its sum.
"""

import torch
from torch import Tensor

from strata_runtime.formats import features, reference
from strata_runtime.formats.pieces import multiply_in_pieces
from strata_runtime.formats.weights import ChannelWeight
from strata_runtime.kernels import native_channels

PACKED_COLUMNS = 16  # `_weight_int8pack_mm` reads past the end of rows that this does not divide
CUDA_INT_MM_TOKENS = 17  # the least number of rows that `_int_mm` takes on CUDA
CUDA_INT_MM_QUANTUM = 8  # and what its inputs and outputs must be multiples of
WEIGHTS_AT_A_TIME = 1 << 21  # converted at once: temporaries of 4 MB, however large the operator
WEIGHTS_AT_A_TIME_ON_CUDA = 1 << 26


def packed_runs(tokens: Tensor, weight: ChannelWeight) -> bool:
    """bfloat16 on a CPU; other types fall to a scalar loop, up to 40 times slower than converting first."""
    return (
        tokens.device.type == "cpu"
        and tokens.dtype == torch.bfloat16
        and weight.codes.shape[1] % PACKED_COLUMNS == 0
        and features.int8pack_on_cpu()
    )


def packed(tokens: Tensor, weight: ChannelWeight) -> Tensor:
    product: Tensor = torch.ops.aten._weight_int8pack_mm(tokens, weight.codes, weight.scales)  # noqa: SLF001 -- torch names its kernels so
    return product


def converted(tokens: Tensor, weight: ChannelWeight) -> Tensor:
    """Codes to the compute type, some rows at a time, then a dense product."""
    out_features, in_features = weight.codes.shape
    at_a_time = WEIGHTS_AT_A_TIME_ON_CUDA if tokens.is_cuda else WEIGHTS_AT_A_TIME

    def rows(start: int, stop: int) -> Tensor:
        return weight.codes[start:stop].to(tokens.dtype)

    return multiply_in_pieces(tokens, (out_features, in_features), at_a_time, rows).mul_(weight.scales)


def native_runs(tokens: Tensor, weight: ChannelWeight) -> bool:
    return native_channels.takes(tokens, weight.codes) and native_channels.fast()


def native(tokens: Tensor, weight: ChannelWeight) -> Tensor:
    """int8 x int8 with exact int32 sums, activations rounded in the same pass: few tokens wait for the weights alone."""
    return native_channels.channel_linear(tokens, weight.codes, weight.scales)


def int_mm_runs(tokens: Tensor, weight: ChannelWeight) -> bool:
    return int8_sums_run(tokens, weight.codes)


def int_mm(tokens: Tensor, weight: ChannelWeight) -> Tensor:
    """int8 x int8 with exact int32 sums."""
    codes, token_scales = reference.quantize_tokens(tokens)
    return (int8_sums(codes, weight.codes).float() * token_scales * weight.scales).to(tokens.dtype)


def int8_reference(tokens: Tensor, weight: ChannelWeight) -> Tensor:
    return reference.multiply_quantized(tokens, weight.codes, weight.scales)


def int8_sums_run(tokens: Tensor, codes: Tensor) -> bool:
    """Whether torch multiplies int8 matrices here, exactly: tokens of any type [M, K], codes [N, K]."""
    if tokens.device.type == "cpu":
        return features.int_mm_on_cpu()
    out_features, in_features = codes.shape
    return tokens.device.type == "cuda" and out_features % CUDA_INT_MM_QUANTUM == in_features % CUDA_INT_MM_QUANTUM == 0


def int8_sums(token_codes: Tensor, codes: Tensor) -> Tensor:
    """int8 [M, K], int8 [N, K] -> int32 [M, N]."""
    count = token_codes.shape[0]
    if token_codes.is_cuda and count < CUDA_INT_MM_TOKENS:
        token_codes = torch.nn.functional.pad(token_codes, (0, 0, 0, CUDA_INT_MM_TOKENS - count))
    sums: Tensor = torch._int_mm(token_codes, codes.t())  # noqa: SLF001 -- torch names its kernels so
    return sums[:count]
