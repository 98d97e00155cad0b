"""Products of int8 activations with int8 weights in the native library (`kernels/native/channel_product.cpp`).

Called by `channel_kernels` and `static_kernels`, if `takes` and `fast`. Checks what the library, which sees addresses and sizes alone, takes on trust. Activations are
rounded in the same pass; values are those of `reference`, bit for bit.
"""

import struct

import torch
from torch import Tensor

from strata_runtime.kernels import native
from strata_runtime.kernels.native_calls import CHANNELS, function, lined_up, product
from strata_runtime.kernels.native_planes import MOST_INPUTS_INT8, TYPE_NUMBERS

_RESULT = struct.Struct("8q")  # the first part of `ChannelCall` of kernels/native/calls.h, then the other
_WEIGHT = struct.Struct("6q")


def fast() -> bool:
    """Whether the library is faster than torch here: with AVX2 alone torch multiplies bytes number by number, in AVX-512 VNNI by oneDNN, as fast as it can be
    where the library's own path in AVX-512 misses something that it needs beside (BF16, VBMI).
    """
    in_avx2 = native.level() == "avx2" and not torch.cpu._is_vnni_supported()  # noqa: SLF001 -- torch has no public name for it
    return in_avx2 or native.multiplies_in_avx512()


def takes(tokens: Tensor, codes: Tensor) -> bool:
    """Whether the library can multiply these: tokens of any compute type [M, K], codes int8 [N, K], on a processor."""
    return (
        tokens.device.type == "cpu"
        and tokens.dtype in TYPE_NUMBERS
        and codes.device.type == "cpu"
        and codes.shape[1] <= MOST_INPUTS_INT8
        and native.library() is not None
    )


def channel_linear(
    tokens: Tensor, codes: Tensor, scales: Tensor, static: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """tokens [M, K], codes int8 [N, K], scales float32 [N] -> [M, N] in the tokens' type.

    `static`: what inputs are divided by before rounding, [K] of the tokens' type, and the scale of what comes of it, float32 []; without it a
    token's largest magnitude is its own 127.
    """
    rows, columns = codes.shape
    if codes.dtype != torch.int8 or scales.dtype != torch.float32 or tokens.shape[1] != columns or len(scales) != rows:
        raise ValueError(
            f"tokens {list(tokens.shape)}, codes {codes.dtype} {list(codes.shape)} and scales {scales.dtype} {list(scales.shape)} do not fit"
        )
    tokens, codes, scales = lined_up(tokens), lined_up(codes), scales.contiguous()
    out = tokens.new_empty(tokens.shape[0], rows)
    static = None if static is None else (static[0].to(tokens.dtype).contiguous(), static[1])
    numbers = (tokens.data_ptr(), tokens.shape[0], columns, tokens.stride(0), TYPE_NUMBERS[tokens.dtype])
    results = (out.data_ptr(), rows, torch.get_num_threads())
    function("strata_channel_linear")(_RESULT.pack(*numbers, *results) + _weight_numbers(codes, scales, static))
    return out


def channel_product(
    codes: Tensor, scales: Tensor, bias: Tensor | None, static: tuple[Tensor, Tensor] | None = None
) -> bytes | None:
    """As a call for a whole layer of bfloat16 tokens names it (`native_calls.product`); None: its memory is not as that call reads it."""
    parts = (codes, scales, bias, *(static or ()))
    if any(each is not None and not each.is_contiguous() for each in parts):
        return None
    return product(CHANNELS, codes.shape[1], bias, _weight_numbers(codes, scales, static))


def _weight_numbers(codes: Tensor, scales: Tensor, static: tuple[Tensor, Tensor] | None) -> bytes:
    """`static`: of the tokens' type. The bytes hold nothing."""
    known = (0, 0) if static is None else (static[0].data_ptr(), static[1].data_ptr())
    return _WEIGHT.pack(codes.shape[0], codes.data_ptr(), codes.stride(0), scales.data_ptr(), *known)
