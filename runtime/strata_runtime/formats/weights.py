"""The stored form of a quantized weight: what kernels read. Made by `store_groups` and `quantize_channels` for `linear`, which holds it as buffers.

Knows how codes lie in memory; knows nothing of tokens or of kernels. Bytes are exactly those of `contract.formats.stored_bytes`.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from strata_planner.contract.formats import (
    BITS_OF_FORMAT,
    GROUP_SIZES,
    FormatName,
    group_size,
    padded_in_features,
    part_in_groups,
)
from strata_runtime.formats import packing, reference
from strata_runtime.formats.errors import PrecisionError
from strata_runtime.formats.planes.planes import cut_planes, unpack_planes
from strata_runtime.formats.quantizers import quantize_groups
from strata_runtime.kernels import native_planes
from strata_runtime.ranges import Range, Ranges, rows_in

PLANE_BITS: dict[FormatName, tuple[int, ...]] = {"int4": (4,), "int3": (2, 1)}
QUANTIZED_AT_A_TIME = 1 << 20  # weights: what is not yet packed stays small beside the checkpoint's own matrix


@dataclass(frozen=True)
class ChannelWeight:
    """Formats `int8` and `w8a8`: codes int8 [N, K], scales [N]."""

    codes: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def part(self, columns: Range) -> "ChannelWeight":
        """Of some inputs alone, with the scales of whole rows."""
        return ChannelWeight(self.codes[:, slice(*columns)].contiguous(), self.scales)

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        return reference.dequantize_channels(self.codes, self.scales)


@dataclass(frozen=True)
class GroupWeight:
    """Formats `int4` and `int3`.

    planes: the nibbles alone, or the plane of two bits and the plane of one (see `packing`); scales_and_zeros: [columns / group, N, 2];
    columns: inputs with their padding, at least in_features.
    """

    planes: tuple[Tensor, ...]
    scales_and_zeros: Tensor
    in_features: int
    columns: int

    @property
    def out_features(self) -> int:
        return self.scales_and_zeros.shape[1]

    @property
    def group(self) -> int:
        return self.columns // self.scales_and_zeros.shape[0]

    def nibbles(self, part: packing.Segment) -> Tensor:
        """The nibbles of some whole blocks, flat: a view where nibbles are what is stored, else joined from the planes."""
        if len(self.planes) == 1:
            return self.planes[0][packing.byte_range(part, self.columns, bits=4)]
        two, one = self.planes
        return packing.join_planes(
            two[packing.byte_range(part, self.columns, bits=2)],
            one[packing.byte_range(part, self.columns, bits=1)],
            part.blocks,
        )

    def dequantized_rows(self, part: packing.Segment) -> Tensor:
        """float32 [rows of the segment, columns]."""
        codes = packing.unpack_segment(self.nibbles(part), part, self.columns)
        return reference.dequantize_groups(codes, self.scales_and_zeros[:, part.start : part.stop])

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        rows = [self.dequantized_rows(part) for part in packing.segments(self.out_features)]
        return torch.cat(rows)[:, : self.in_features]


def store_groups(
    weight: Tensor, format_name: FormatName, scale_dtype: torch.dtype, inputs: Range | None = None
) -> GroupWeight:
    """Quantize and pack a few blocks of rows at a time. weight: [N, K], finite; inputs: what is stored of K, None: all.

    A part has the codes, scales and zeros that the whole has; where it begins or ends within a group, its groups are narrower. Raises
    PrecisionError where none is narrow enough.
    """
    out_features, in_features = weight.shape
    whole_columns, whole_group = padded_in_features(in_features), group_size(in_features)
    first, last = (0, in_features) if inputs is None else inputs
    columns, group = part_in_groups(in_features, first, last)
    end = first + columns
    if not group:
        raise PrecisionError(
            f"inputs {first} to {end} begin or end within a group of {GROUP_SIZES[-1]}: weights of 3 and 4 bits in groups are not cut there; use any "
            "precision, 8 bits, or fewer ranks"
        )
    of_group = torch.arange(first, end, group, device=weight.device) // whole_group
    bits_of_planes = PLANE_BITS[format_name]
    planes = tuple(
        torch.empty(out_features * columns * bits // 8, dtype=torch.uint8, device=weight.device)
        for bits in bits_of_planes
    )
    scales_and_zeros = torch.empty(columns // group, out_features, 2, dtype=scale_dtype, device=weight.device)
    for part in packing.pieces(out_features, columns, QUANTIZED_AT_A_TIME):
        rows = weight[part.start : part.stop]
        padded = torch.nn.functional.pad(rows, (0, whole_columns - in_features))
        stored = quantize_groups(padded, BITS_OF_FORMAT[format_name], whole_group, scale_dtype)
        nibbles = packing.pack_segment(stored.codes[:, first:end], part)
        packed = (nibbles,) if len(planes) == 1 else packing.split_planes(nibbles, part.blocks)
        for plane, bits, piece in zip(planes, bits_of_planes, packed, strict=True):
            plane[packing.byte_range(part, columns, bits)] = piece
        scales_and_zeros[:, part.start : part.stop, 0] = stored.scales.t()[of_group]
        scales_and_zeros[:, part.start : part.stop, 1] = stored.zeros.t()[of_group]
    return GroupWeight(planes, scales_and_zeros, last - first, columns)


@dataclass(frozen=True)
class PlanesWeight:
    """Formats `any3` ... `any8`: the value of a weight is the centroid of its output that its code names.

    planes: as many as the format has bits, most significant first, each uint8 [N, columns / 8] (see `planes`); table: centroids
    [N, 2^bits] in the compute type.
    """

    planes: tuple[Tensor, ...]
    table: Tensor
    in_features: int

    @property
    def bits(self) -> int:
        return len(self.planes)

    @property
    def out_features(self) -> int:
        return self.table.shape[0]

    @cached_property
    def native(self) -> native_planes.Stored:
        """As the native library is called with it."""
        return native_planes.Stored.of(self.planes, self.table)

    def part(self, rows: Ranges | None, columns: Range | None) -> "PlanesWeight":
        """Of some outputs and some inputs alone; None: of all."""
        planes, table = tuple(rows_in(plane, rows) for plane in self.planes), rows_in(self.table, rows)
        if columns is None:
            return PlanesWeight(planes, table, self.in_features)
        return PlanesWeight(cut_planes(planes, self.in_features, columns), table, columns[1] - columns[0])

    def dequantized_rows(self, start: int, stop: int) -> Tensor:
        """[stop - start, K] in the table's type."""
        codes = unpack_planes([plane[start:stop] for plane in self.planes], self.in_features)
        return self.table[start:stop].gather(1, codes.long())

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        return self.dequantized_rows(0, self.out_features).float()
