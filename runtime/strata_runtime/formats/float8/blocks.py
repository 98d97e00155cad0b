"""The stored form of a float8 weight with a scale for each block of outputs and inputs (`fp8_block`), as DeepSeek-V3 has it (arXiv 2412.19437).

Made by `checked_blocks` from a checkpoint's own codes and scales, held as buffers by `block_linear`. Nothing is rounded anew.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from strata_runtime.formats.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.formats.float8.float8 import E4M3, decode
from strata_runtime.ranges import Range, Ranges

_MAGNITUDE = 0x7F  # of e4m3: all ones are NaN
_AGAIN = "fetch the checkpoint again"


@dataclass(frozen=True)
class BlockFloat8Weight:
    """codes: float8 [N, K], finite; scales: float32 [ceil(N / block[0]), ceil(K / block[1])]."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def part(self, rows: Ranges | None, columns: Range | None) -> "BlockFloat8Weight":
        """Of some outputs and some inputs alone; None: of all. Where a part begins or ends within a block, its blocks are smaller."""
        count, width = self.codes.shape
        outputs, own_rows = _within(self.block[0], rows or ((0, count),))
        inputs, own_columns = _within(self.block[1], (columns or (0, width),))
        codes = self.codes.view(torch.uint8)[own_rows][:, own_columns].view(E4M3)
        scales = self.scales[own_rows[::outputs] // self.block[0]][:, own_columns[::inputs] // self.block[1]]
        return BlockFloat8Weight(codes.contiguous(), scales.contiguous(), (outputs, inputs))

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        outputs, inputs = self.block
        of_row = torch.arange(start, stop, device=self.codes.device) // outputs
        scales = self.scales.index_select(0, of_row)
        values = decode(self.codes[start:stop])
        whole = values.shape[1] // inputs * inputs
        blocks = values[:, :whole].view(stop - start, whole // inputs, inputs)
        blocks.mul_(scales[:, : whole // inputs, None])
        values[:, whole:].mul_(scales[:, whole // inputs :])
        return values

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        return self.rows(0, self.out_features)


def _within(block: int, ranges: Ranges) -> tuple[int, Tensor]:
    """The largest size of blocks at which every block of a part lies in one of the whole's, and the places of the part."""
    *but_last, _ = ranges
    edges = [first for first, _ in ranges] + [last for _, last in but_last]
    return gcd(block, *edges), torch.cat([torch.arange(*each) for each in ranges])


def checked_blocks(name: str, codes: Tensor, scales: Tensor, block: tuple[int, int]) -> BlockFloat8Weight:
    """From what a checkpoint holds of the linear `name`. Raises PrecisionError for types and shapes that do not fit, WeightNotFiniteError."""
    if codes.dtype != E4M3 or codes.ndim != 2 or not scales.is_floating_point():
        raise PrecisionError(
            f"{name}: a weight of {codes.dtype} {list(codes.shape)} with scales of {scales.dtype}; {E4M3} [N, K] with scales of a "
            f"floating type is needed; {_AGAIN}"
        )
    expected = [-(-size // of_block) for size, of_block in zip(codes.shape, block, strict=True)]
    if list(scales.shape) != expected:
        raise PrecisionError(
            f"{name}: scales {list(scales.shape)}; a weight of {list(codes.shape)} in blocks of {list(block)} needs {expected}; {_AGAIN}"
        )
    broken = int((codes.view(torch.uint8).bitwise_and(_MAGNITUDE) == _MAGNITUDE).sum()) + int(
        (~torch.isfinite(scales)).sum()
    )
    if broken:
        raise WeightNotFiniteError(f"{name}: {broken} codes or scales are NaN or infinite; {_AGAIN}")
    return BlockFloat8Weight(codes, scales.float(), block)
