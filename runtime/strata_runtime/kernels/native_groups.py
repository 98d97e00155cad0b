"""Products of bfloat16 with weights of 4 or 3 bits in groups, in the native library, where it has AVX2: whole blocks of 64 rows as `formats.packing` lays them.

Called by `formats.rounded.group_kernels`. Knows nothing of formats. Values are codes times a scale plus an origin, in float32; `rounds` says whether they are
rounded to bfloat16 first, by which many tokens are multiplied as those of a packed weight are.
"""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from strata_runtime.kernels.native_calls import function, lined_up

BLOCK_ROWS = 64
_CALL = struct.Struct("14q")  # `NibblesCall` of kernels/native/nibbles.h


def blocks_linear(
    tokens: Tensor, planes: Sequence[Tensor], scales_and_zeros: Tensor, rows: int, out: Tensor, *, rounds: bool
) -> None:
    """tokens: bfloat16 [M, columns]; planes: uint8, the nibbles alone, or two bits and the lowest; scales_and_zeros: bfloat16 [groups, N, 2] -> the first
    `rows` of out, bfloat16 [M, N].
    """
    groups, columns = scales_and_zeros.shape[0], tokens.shape[1]
    if tokens.dtype is not torch.bfloat16 or scales_and_zeros.dtype is not torch.bfloat16 or rows % BLOCK_ROWS:
        raise ValueError(
            f"tokens {tokens.dtype}, scales {scales_and_zeros.dtype} must be bfloat16, and {rows} rows whole blocks of {BLOCK_ROWS}"
        )
    shares = (2,) if len(planes) == 1 else (4, 8)  # weights of a byte
    held = all(
        each.is_contiguous() and each.numel() * n >= rows * columns for each, n in zip(planes, shares, strict=True)
    )
    if columns % (4 * groups) or not held or out.dtype is not tokens.dtype or out.stride(1) != 1:
        raise ValueError(f"tokens {list(tokens.shape)} do not fit {groups} groups and planes of {[*map(len, planes)]}")
    tokens, pairs = lined_up(tokens), scales_and_zeros.contiguous()
    lowest = planes[1].data_ptr() if len(planes) > 1 else 0
    given = (
        tokens.data_ptr(),
        tokens.shape[0],
        tokens.stride(0),
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )
    weight = (rows, columns, columns // groups, planes[0].data_ptr(), lowest, pairs.data_ptr(), pairs.stride(0))
    function("strata_groups_linear")(_CALL.pack(*given, *weight, int(rounds)))
