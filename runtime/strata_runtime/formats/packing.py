"""Bits in bytes: codes of 4 and 3 bits packed without a bit to spare, in the order that torch's int4 CPU kernel reads.

Called by `linear` (pack once) and `kernels` (unpack a few rows at a time). Knows nothing of scales or of multiplication.

Nibbles. Rows go in blocks of 64; a block is bytes [K, 32], byte (k, r) holding row r in its low and row r + 32 in its high half.
The rows that are left, as far as 16 divides them, form one block of bytes [K, rows / 2] holding rows 2r and 2r + 1. That is the
layout of `aten::_convert_weight_to_int4pack_for_cpu` with AVX-512. The last rows (less than 16, which that kernel refuses)
follow as bytes [rows, K / 2] holding inputs 2k and 2k + 1: no row is padded.

Planes. The nibbles of one block are cut into four quarters; byte i of the one-bit plane holds the lowest bits of byte i of all four,
byte i of each half of the two-bit plane the upper bits of two quarters. So three bits become nibbles with two masks and a few shifts
on whole vectors, and the rest is the int4 path.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 64
ROW_QUANTUM = 16


@dataclass(frozen=True)
class Segment:
    """A run of `blocks` blocks of `rows` rows each, from row `start`."""

    start: int
    blocks: int
    rows: int

    @property
    def is_tail(self) -> bool:
        return self.rows < ROW_QUANTUM

    @property
    def stop(self) -> int:
        return self.start + self.blocks * self.rows


def segments(out_features: int) -> Iterator[Segment]:
    """Full blocks, one block of a multiple of 16 rows, the last rows; those that are empty are left out."""
    full, rest = divmod(out_features, BLOCK_ROWS)
    tail = rest % ROW_QUANTUM
    candidates = (
        Segment(0, full, BLOCK_ROWS),
        Segment(full * BLOCK_ROWS, 1, rest - tail),
        Segment(out_features - tail, 1, tail),
    )
    return (segment for segment in candidates if segment.blocks * segment.rows)


def pieces(out_features: int, in_features: int, weights_at_a_time: int | None) -> Iterator[Segment]:
    """The segments, full blocks cut into runs of about so many weights (None: not cut)."""
    for part in segments(out_features):
        step = part.blocks
        if weights_at_a_time is not None:
            step = max(1, weights_at_a_time // (BLOCK_ROWS * in_features))
        for block in range(0, part.blocks, step):
            yield Segment(part.start + block * part.rows, min(step, part.blocks - block), part.rows)


def byte_range(part: Segment, in_features: int, bits: int) -> slice:
    """Where the segment lies in a plane that holds `bits` bits of each code."""
    return slice(part.start * in_features * bits // 8, part.stop * in_features * bits // 8)


def pack_segment(codes: Tensor, part: Segment) -> Tensor:
    """codes: uint8 [rows of the segment, K] below 16, K even -> its nibbles, uint8 [rows * K / 2]."""
    in_features = codes.shape[1]
    if part.is_tail:
        low, high = codes[:, 0::2], codes[:, 1::2]
        return (low | (high << 4)).flatten()
    if part.rows == BLOCK_ROWS:
        low, high = codes.view(part.blocks, 2, BLOCK_ROWS // 2, in_features).unbind(1)
    else:
        low, high = codes.view(part.blocks, part.rows // 2, 2, in_features).unbind(2)
    return (low | (high << 4)).transpose(1, 2).flatten()


def unpack_segment(nibbles: Tensor, part: Segment, in_features: int) -> Tensor:
    """The bytes of one segment (or of whole blocks of it) -> codes uint8 [rows, K]."""
    low, high = nibbles & 15, nibbles >> 4
    if part.is_tail:
        return torch.stack((low.view(part.rows, -1), high.view(part.rows, -1)), dim=2).view(part.rows, in_features)
    shape = (part.blocks, in_features, part.rows // 2)
    halves = torch.stack((low.view(shape), high.view(shape)), dim=1 if part.rows == BLOCK_ROWS else 3)
    if part.rows == BLOCK_ROWS:  # [blocks, 2, K, 32] -> rows r, then r + 32
        return halves.transpose(2, 3).reshape(-1, in_features)
    return halves.permute(0, 2, 3, 1).reshape(-1, in_features)  # [blocks, K, rows / 2, 2] -> rows 2r, 2r + 1


def split_planes(nibbles: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Nibbles of codes below 8 in `blocks` blocks -> a plane of two bits, uint8 [len / 2], and one of one bit, uint8 [len / 4]."""
    quarters = nibbles.view(blocks, 4, -1)
    low, high = quarters & 0x11, (quarters >> 1) & 0x33
    two = high[:, 0::2] | (high[:, 1::2] << 2)
    one = low[:, 0] | (low[:, 1] << 1) | (low[:, 2] << 2) | (low[:, 3] << 3)
    return two.flatten(), one.flatten()


def join_planes(two: Tensor, one: Tensor, blocks: int) -> Tensor:
    """The planes of `blocks` blocks -> their nibbles, uint8 [4 * len(one)].

    Words of eight bytes where the length allows: shifts are several times faster on them, and the masks drop what crosses a byte.
    """
    word, ones = (torch.int64, 0x0101010101010101) if one.numel() % (8 * blocks) == 0 else (torch.uint8, 1)
    one, two = one.view(word).view(blocks, 1, -1), two.view(word).view(blocks, 2, -1)
    nibbles = one >> torch.arange(4, dtype=word, device=one.device).view(1, 4, 1)
    nibbles &= 0x11 * ones
    upper = torch.empty_like(nibbles).view(blocks, 2, 2, -1)
    torch.bitwise_left_shift(two, 1, out=upper[:, :, 0])
    torch.bitwise_right_shift(two, 1, out=upper[:, :, 1])
    upper &= 0x66 * ones
    nibbles |= upper.view_as(nibbles)
    return nibbles.view(torch.uint8).view(-1)
