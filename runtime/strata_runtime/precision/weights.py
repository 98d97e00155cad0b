"""The stored form of a quantized weight: what kernels read. Made once by `linear`, held as the buffers of a module.

Knows how codes lie in memory; knows nothing of tokens or of kernels. Bytes are exactly those of `contract.formats.stored_bytes`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_runtime.precision import packing, reference


@dataclass(frozen=True)
class ChannelWeight:
    """Formats `int8` and `w8a8`: codes int8 [N, K], scales [N]."""

    codes: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

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
