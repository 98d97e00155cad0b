"""A weight as GPTQ leaves it: integer codes, a scale and a zero for each output and group of inputs, and the group of each input.

Made from the tensors of a checkpoint (`tensors`) or by the quantizer (`solver`); stored for running by `weight`, written by `writer`. What a
code means is here: `weight = scale * (code - zero)`. Knows nothing of how codes are packed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_runtime.ranges import Range, Ranges, rows_in

VALUES_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class GptqCodes:
    """codes: uint8 [N, K] below 2^bits, inputs in the model's own order; scales: [N, G] floating; zeros: uint8 [N, G]; groups: int32 [K], which
    of the G groups an input belongs to.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def part(self, rows: Ranges | None, columns: Range | None) -> "GptqCodes":
        """Of some outputs and some inputs alone; None: of all."""
        codes, scales, zeros = (rows_in(each, rows) for each in (self.codes, self.scales, self.zeros))
        inputs = slice(*(columns or (0, self.in_features)))
        return GptqCodes(self.bits, codes[:, inputs], scales, zeros, self.groups[inputs])

    def narrowed(self, group: int) -> "GptqCodes":
        """The same values with a scale and zero for each `group` inputs, all of which have the same ones."""
        first = self.groups[::group].long()
        groups = group_of_inputs(self.in_features, group, device=self.groups.device)
        return GptqCodes(self.bits, self.codes, self.scales[:, first], self.zeros[:, first], groups)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K]: the product of scale and difference, rounded once to `dtype` (exact in float32 where scales have 16 bits)."""
        out = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        groups = self.groups.long()
        for rows in _some_rows(self.out_features, self.in_features):
            steps = self.codes[rows].float() - self.zeros[rows].float()[:, groups]
            out[rows] = (self.scales[rows].float()[:, groups] * steps).to(dtype)
        return out


def group_of_inputs(in_features: int, group: int, *, device: torch.device | None = None) -> Tensor:
    """int32 [K]: groups that are runs of `group` inputs."""
    return torch.arange(in_features, dtype=torch.int32, device=device) // group


def _some_rows(out_features: int, in_features: int) -> Iterator[slice]:
    step = max(1, VALUES_AT_A_TIME // max(1, in_features))
    return (slice(start, start + step) for start in range(0, out_features, step))
