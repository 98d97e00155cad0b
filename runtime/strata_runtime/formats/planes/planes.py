"""Bit-planes: the codes of a weight cut into one matrix of bits per significance, the most significant first.

Made by the quantizers of nested formats and by readers of GPTQ checkpoints; multiplied from directly by the kernels of bit-planes. A weight of k
bits is the first k planes of its 8-bit parent. Knows nothing of what a code means.

Layout of a plane: uint8 [N, columns / 8] with columns = K padded to 64 by zeros. Columns go in tiles of 512, the last one may be shorter (a
multiple of 64). In a tile of w columns that starts at s, byte j holds the bits of columns s + b * w/8 + j, b = 0..7, the least
significant bit of the byte first. So one mask on a run of bytes gives the bits of neighbouring columns: what vectors of the kernels read is
contiguous in the activations too (the byte-permuted layout of Any-Precision LLM, arXiv 2402.10517, section 5.2, with the tile as unit).
A cut of columns at multiples of 512 cuts planes at whole bytes: what tensor parallelism needs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from strata_planner.contract.formats import plane_columns

TILE_COLUMNS = 512
_BITS_OF_BYTE = 8


def pack_planes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """codes: uint8 [N, K] below 2^bits -> `bits` planes, each uint8 [N, columns / 8], the most significant first."""
    out_features, in_features = codes.shape
    columns = plane_columns(in_features)
    planes = tuple(
        torch.empty(out_features, columns // _BITS_OF_BYTE, dtype=torch.uint8, device=codes.device) for _ in range(bits)
    )
    places = torch.arange(_BITS_OF_BYTE, dtype=torch.uint8, device=codes.device).view(-1, 1)
    for start, stop in _tiles(columns):
        tile = torch.nn.functional.pad(codes[:, start:stop], (0, max(0, stop - max(start, in_features))))
        by_bit = tile.reshape(out_features, _BITS_OF_BYTE, -1)
        for significance, plane in zip(range(bits - 1, -1, -1), planes, strict=True):
            bit = (by_bit >> significance) & 1
            plane[:, start // _BITS_OF_BYTE : stop // _BITS_OF_BYTE] = (bit << places).sum(dim=1, dtype=torch.uint8)
    return planes


def unpack_planes(planes: Sequence[Tensor], in_features: int) -> Tensor:
    """Planes, the most significant first -> codes uint8 [N, K], below 2^len(planes)."""
    out_features, row_bytes = planes[0].shape
    columns = row_bytes * _BITS_OF_BYTE
    codes = torch.zeros(out_features, columns, dtype=torch.uint8, device=planes[0].device)
    places = torch.arange(_BITS_OF_BYTE, dtype=torch.uint8, device=codes.device).view(-1, 1)
    for start, stop in _tiles(columns):
        tile = codes[:, start:stop].view(out_features, _BITS_OF_BYTE, -1)
        for plane in planes:
            tile <<= 1
            tile |= (plane[:, None, start // _BITS_OF_BYTE : stop // _BITS_OF_BYTE] >> places) & 1
    return codes[:, :in_features]


def cut_planes(planes: Sequence[Tensor], in_features: int, columns: tuple[int, int]) -> tuple[Tensor, ...]:
    """The same planes of inputs `columns` alone, of `in_features`: packed anew, since tiles begin elsewhere."""
    codes = unpack_planes(planes, in_features)[:, slice(*columns)]
    return pack_planes(codes, len(planes))


def _tiles(columns: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + TILE_COLUMNS, columns)) for start in range(0, columns, TILE_COLUMNS))
