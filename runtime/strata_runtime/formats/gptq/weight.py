"""The stored form of a GPTQ weight: bit-planes of codes whose inputs lie group by group. What kernels read.

Made by `store` from codes, held as buffers by `gptq_linear`. Bytes are exactly those of `contract.formats.stored_bytes`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_runtime.formats.errors import PrecisionError
from strata_runtime.formats.gptq.codes import GptqCodes, group_of_inputs
from strata_runtime.formats.planes.planes import pack_planes, unpack_planes

_SCALE_ERROR = 2.0**-11  # what rounding to float16 may cost a scale of more bits, relative


@dataclass(frozen=True)
class GptqWeight:
    """planes: `bits` of them, the most significant first, each uint8 [N, columns / 8] (see `formats.planes.planes`); scales: float16 [N, G]; zeros:
    uint8 [N, G]; input k of the planes belongs to group k // group, and is the model's input order[k] (None: the same one).
    """

    planes: tuple[Tensor, ...]
    scales: Tensor
    zeros: Tensor
    group: int
    in_features: int
    order: Tensor | None = None

    @property
    def bits(self) -> int:
        return len(self.planes)

    @property
    def out_features(self) -> int:
        return self.scales.shape[0]

    def gathered(self, tokens: Tensor) -> Tensor:
        """tokens [M, K] with their inputs in the order of the planes."""
        return tokens if self.order is None else tokens.index_select(1, self.order)

    def stored_rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K], inputs in the order of the planes."""
        codes = unpack_planes([plane[start:stop] for plane in self.planes], self.in_features)
        zeros = _spread(self.zeros[start:stop].float(), self.group, self.in_features)
        scales = _spread(self.scales[start:stop].float(), self.group, self.in_features)
        return scales.mul_(zeros.neg_().add_(codes))

    def dequantized(self) -> Tensor:
        """float32 [N, K], inputs in the model's own order."""
        rows = self.stored_rows(0, self.out_features)
        return rows if self.order is None else rows[:, torch.argsort(self.order.long())]


def store(codes: GptqCodes, *, group: int | None, name: str) -> GptqWeight:
    """`group`: inputs that share a scale, None: all. Raises PrecisionError, naming the linear, for what the format cannot hold."""
    size = min(group or codes.in_features, codes.in_features)
    runs = group_of_inputs(codes.in_features, size, device=codes.groups.device)
    in_order = bool(torch.equal(codes.groups, runs))
    order = None if in_order else torch.argsort(codes.groups, stable=True)
    if order is not None and not torch.equal(codes.groups[order], runs):
        sizes = torch.bincount(codes.groups.long())
        raise PrecisionError(
            f"{name}: its groups have from {int(sizes.min())} to {int(sizes.max())} inputs, and all must have {size} but the last: "
            "let the plan give this model 16 bits"
        )
    sorted_codes = codes.codes if order is None else codes.codes.index_select(1, order)
    return GptqWeight(
        planes=pack_planes(sorted_codes, codes.bits),
        scales=_float16(codes.scales, name),
        zeros=codes.zeros.contiguous(),
        group=size,
        in_features=codes.in_features,
        order=None if order is None else order.to(torch.int32),
    )


def _spread(values: Tensor, group: int, in_features: int) -> Tensor:
    """[N, G] -> [N, K]."""
    return values.repeat_interleave(group, dim=1)[:, :in_features]


def _float16(scales: Tensor, name: str) -> Tensor:
    """Exact for float16, and for bfloat16 unless tiny; float32 is rounded, at most by half a unit of the last place."""
    rounded = scales.to(torch.float16)
    error = (rounded.float() - scales.float()).abs()
    if not bool((error <= scales.float().abs() * _SCALE_ERROR).all()):
        raise PrecisionError(
            f"{name}: scales from {float(scales.float().abs().min()):g} to {float(scales.float().abs().max()):g} do not fit "
            "float16, in which they are stored: let the plan give this model 16 bits"
        )
    return rounded.contiguous()
