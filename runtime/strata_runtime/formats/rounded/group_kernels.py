"""Products with a GroupWeight (`int4`, `int3`). Listed and chosen in `kernels`; each is tested against `reference`.

All work on the nibbles of whole blocks of rows: three bits become nibbles a few blocks, or in the native library a group, at a time, so that nothing but
the planes persists and temporaries stay within the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from strata_runtime.formats import features, packing
from strata_runtime.formats.quantizers import CODE_OFFSET
from strata_runtime.formats.weights import GroupWeight
from strata_runtime.kernels import native_dense, native_groups
from strata_runtime.kernels.native_dense import multiply_once

HALF_BLOCK = packing.BLOCK_ROWS // 2
JOINED_AT_A_TIME = 1 << 21  # weights whose planes are joined at once, 1 MB of nibbles
WEIGHTS_AT_A_TIME = 1 << 21  # dequantized at once: temporaries of 9 MB
WEIGHTS_AT_A_TIME_ON_CUDA = 1 << 26


def native_runs(tokens: Tensor, weight: GroupWeight) -> bool:
    """Where nothing else multiplies bfloat16: torch's kernel for few bits goes number by number there."""
    return native_dense.alone(tokens.dtype, tokens.device) and weight.scales_and_zeros.dtype is torch.bfloat16


def native(tokens: Tensor, weight: GroupWeight) -> Tensor:
    """Straight from the nibbles, in the native library."""
    return _native(tokens, weight, rounds=False)


def decoded(tokens: Tensor, weight: GroupWeight) -> Tensor:
    """A group of a block at a time to bfloat16, then as a packed weight, in the native library."""
    return _native(tokens, weight, rounds=True)


def _native(tokens: Tensor, weight: GroupWeight, *, rounds: bool) -> Tensor:
    """Whole blocks; the other rows are dequantized."""
    tokens = _padded(tokens, weight)
    out = tokens.new_empty(tokens.shape[0], weight.out_features)
    for part in packing.segments(weight.out_features):
        if part.rows == packing.BLOCK_ROWS:
            native_groups.blocks_linear(tokens, weight.planes, weight.scales_and_zeros, part.stop, out, rounds=rounds)
        else:
            out[:, part.start : part.stop] = _dense(tokens, weight, part)
    return out


def packed_runs(tokens: Tensor, _weight: GroupWeight) -> bool:
    """bfloat16 on a CPU; other types fall to a scalar loop, up to 50 times slower than dequantizing first."""
    return tokens.device.type == "cpu" and tokens.dtype == torch.bfloat16 and features.int4pack_on_cpu()


def packed(tokens: Tensor, weight: GroupWeight) -> Tensor:
    """torch's int4 kernel on nibbles; the last rows, which it refuses, are dequantized."""
    tokens = _padded(tokens, weight)
    pieces = []
    at_a_time = JOINED_AT_A_TIME if len(weight.planes) > 1 else None
    for part in packing.pieces(weight.out_features, weight.columns, at_a_time):
        if part.is_tail:
            pieces.append(_dense(tokens, weight, part))
            continue
        rows = part.stop - part.start
        nibbles = weight.nibbles(part).view(rows, -1)
        scales_and_zeros = weight.scales_and_zeros[:, part.start : part.stop].contiguous()
        pieces.append(torch.ops.aten._weight_int4pack_mm_for_cpu(tokens, nibbles, weight.group, scales_and_zeros))  # noqa: SLF001 -- torch names its kernels so
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def dequantized(tokens: Tensor, weight: GroupWeight) -> Tensor:
    """A few blocks of the weight to the compute type, then a dense product."""
    tokens = _padded(tokens, weight)
    out = tokens.new_empty(tokens.shape[0], weight.out_features)
    at_a_time = WEIGHTS_AT_A_TIME_ON_CUDA if tokens.is_cuda else WEIGHTS_AT_A_TIME
    for part in packing.pieces(weight.out_features, weight.columns, at_a_time):
        columns = out[:, part.start : part.stop]
        if part.rows == packing.BLOCK_ROWS:
            sides = columns.view(tokens.shape[0], part.blocks, 2, HALF_BLOCK).unbind(2)
            for side, half in zip(sides, _transposed_halves(weight, part, tokens.dtype), strict=True):
                side.copy_(multiply_once(tokens, half.t()).view_as(side))
        else:
            columns.copy_(_dense(tokens, weight, part))
    return out


def _transposed_halves(weight: GroupWeight, part: packing.Segment, dtype: torch.dtype) -> Iterator[Tensor]:
    """Full blocks -> the first, then the second 32 rows of each: [columns, blocks * 32] of the compute type.

    Inputs stay outermost, as in the block, so that no single nibble is transposed; one copy of runs of 32 bytes makes the rest long
    vectors, which is what elementwise operators are fast on.
    """
    blocks = weight.nibbles(part).view(part.blocks, weight.columns, HALF_BLOCK)
    nibbles = blocks.transpose(0, 1).contiguous().view(-1, weight.group, part.blocks * HALF_BLOCK)
    pairs = weight.scales_and_zeros[:, part.start : part.stop].float()
    scales, zeros = pairs.view(-1, part.blocks, 2, HALF_BLOCK, 2).permute(4, 2, 0, 1, 3).flatten(3).unsqueeze(3)
    zeros = zeros - CODE_OFFSET * scales  # each [2, groups, 1, blocks * 32]
    for side, codes in enumerate((nibbles & 15, nibbles >> 4)):
        values = codes.float()
        yield torch.addcmul(zeros[side], values, scales[side], out=values).to(dtype).view(weight.columns, -1)


def _dense(tokens: Tensor, weight: GroupWeight, part: packing.Segment) -> Tensor:
    return multiply_once(tokens, weight.dequantized_rows(part).to(tokens.dtype))


def _padded(tokens: Tensor, weight: GroupWeight) -> Tensor:
    missing = weight.columns - weight.in_features
    return torch.nn.functional.pad(tokens, (0, missing)) if missing else tokens
