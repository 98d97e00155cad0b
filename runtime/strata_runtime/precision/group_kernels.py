"""Products with a GroupWeight (`int4`, `int3`). Listed and chosen in `kernels`; each is tested against `reference`.

Both work on the nibbles of whole blocks of rows: three bits become nibbles a few blocks at a time, so that nothing but the planes persists
and temporaries stay within the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from strata_runtime.precision import features, packing
from strata_runtime.precision.quantizers import CODE_OFFSET
from strata_runtime.precision.weights import GroupWeight

JOINED_AT_A_TIME = 1 << 21  # weights whose planes are joined at once, 1 MB of nibbles
WEIGHTS_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 26}  # dequantized at once: temporaries of a few MB on a CPU


def packed_runs(tokens: Tensor, _weight: GroupWeight) -> bool:
    """bfloat16 on a CPU; other types fall to a scalar loop, up to 50 times slower than dequantizing first."""
    return tokens.device.type == "cpu" and tokens.dtype == torch.bfloat16 and features.int4pack_on_cpu()


def packed(tokens: Tensor, weight: GroupWeight) -> Tensor:
    """torch's int4 kernel on nibbles; the last rows, which it refuses, are dequantized."""
    tokens = _padded(tokens, weight)
    pieces = []
    for part in _pieces(weight, JOINED_AT_A_TIME if len(weight.planes) > 1 else None):
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
    for part in _pieces(weight, WEIGHTS_AT_A_TIME[tokens.device.type]):
        if part.rows == packing.BLOCK_ROWS:
            out[:, part.start : part.stop] = tokens @ _transposed_blocks(weight, part, tokens.dtype)
        else:
            out[:, part.start : part.stop] = _dense(tokens, weight, part)
    return out


def _transposed_blocks(weight: GroupWeight, part: packing.Segment, dtype: torch.dtype) -> Tensor:
    """Full blocks -> [columns, rows] of the compute type: the blocks hold inputs outermost, so this way round no byte is transposed."""
    half = packing.BLOCK_ROWS // 2
    nibbles = weight.nibbles(part).view(part.blocks, weight.columns, half)
    pairs = weight.scales_and_zeros[:, part.start : part.stop].float()
    scales, zeros = (
        pairs.view(-1, part.blocks, 2, half, 2).permute(4, 2, 1, 0, 3).unsqueeze(4)
    )  # each [2, blocks, groups, 1, 32]
    zeros = zeros - CODE_OFFSET * scales
    result = torch.empty(weight.columns, part.blocks, 2, half, dtype=dtype, device=nibbles.device)
    for side, codes in enumerate((nibbles & 15, nibbles >> 4)):
        values = codes.float().view(part.blocks, -1, weight.group, half)
        torch.addcmul(zeros[side], values, scales[side], out=values)
        result[:, :, side] = values.view(part.blocks, weight.columns, half).transpose(0, 1)
    return result.view(weight.columns, -1)


def _dense(tokens: Tensor, weight: GroupWeight, part: packing.Segment) -> Tensor:
    return torch.nn.functional.linear(tokens, weight.dequantized_rows(part).to(tokens.dtype))


def _padded(tokens: Tensor, weight: GroupWeight) -> Tensor:
    missing = weight.columns - weight.in_features
    return torch.nn.functional.pad(tokens, (0, missing)) if missing else tokens


def _pieces(weight: GroupWeight, weights_at_a_time: int | None) -> Iterator[packing.Segment]:
    """The segments, full blocks cut into runs of about so many weights."""
    for part in packing.segments(weight.out_features):
        step = part.blocks
        if weights_at_a_time is not None:
            step = max(1, weights_at_a_time // (packing.BLOCK_ROWS * weight.columns))
        for block in range(0, part.blocks, step):
            yield packing.Segment(part.start + block * part.rows, min(step, part.blocks - block), part.rows)
