"""The any-precision value of one weight: codes of the parent and a table of centroids for every width. Made by `quantize_any`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_runtime.formats.errors import PrecisionError
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.formats.weights import PlanesWeight


@dataclass(frozen=True)
class AnyParent:
    """codes: uint8 [N, K] of `bits` bits; tables: bits -> centroids float16 [N, 2^bits], each row in rising order.

    The code of a weight at k bits is the k most significant bits of its code here.
    """

    codes: Tensor
    tables: Mapping[int, Tensor]

    @property
    def bits(self) -> int:
        return max(self.tables)

    def codes_at(self, bits: int) -> Tensor:
        """uint8 [N, K] below 2^bits. Raises PrecisionError for a width without a table."""
        if bits not in self.tables:
            raise PrecisionError(
                f"{bits} bits: this parent has tables of {', '.join(map(str, sorted(self.tables)))} bits"
            )
        return self.codes >> (self.bits - bits)

    def at(self, bits: int, compute_dtype: torch.dtype) -> PlanesWeight:
        """The model of `bits` bits as kernels read it. Raises PrecisionError as `codes_at`."""
        planes = pack_planes(self.codes_at(bits), bits)
        return PlanesWeight(planes, self.tables[bits].to(compute_dtype), self.codes.shape[1])

    def dequantized(self, bits: int) -> Tensor:
        """float32 [N, K]."""
        return self.tables[bits].float().gather(1, self.codes_at(bits).long())
