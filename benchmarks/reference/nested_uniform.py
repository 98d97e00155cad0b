"""The uniform nested form: an 8-bit parent in groups, whose most significant k bits are a k-bit model on an even grid.

The alternative to the any-precision form that kernels of scales and zeros can read (MatQuant, arXiv 2502.06786, slices so; MatGPTQ likewise). Measured beside it by
`python -m benchmarks.quality`; no format of plans. Knows nothing of packing.

A code c of 8 bits stands for zero + c * scale. Its k most significant bits stand for the middle of the 2^(8-k) codes that begin with them. So rounding to
the nearest code of 8 bits gives the nearest value at every k, and only the range of a group is left to choose: wide for many bits, which tell
outliers apart, narrow for few. It is searched for the least sum over k of emphasis^k times the weighted squared error: errors fall as 4^-k, so a plain
sum would see 3 bits alone, and an emphasis of 4 lets 8 bits forbid any narrowing; 2 lies between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_planner.contract.formats import GPTQ_GROUP, plane_columns
from strata_runtime.formats.errors import PrecisionError

PARENT_BITS = 8
WIDTHS = (3, 4, 5, 6, 7, 8)
EMPHASIS = 2.0
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of either end of a group's range
ROUNDS = 2
VALUES_AT_A_TIME = 1 << 18
_TOP = (1 << PARENT_BITS) - 1
_SCALE_AND_ZERO_BYTES = 4


@dataclass(frozen=True)
class NestedUniform:
    """codes: uint8 [N, K]; scales, zeros: float16 [N, groups]; `group` inputs share one, the last group may be shorter."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int

    def at(self, bits: int) -> Tensor:
        """The model of `bits` bits, 1 to 8: float32 [N, K]."""
        columns = self.codes.shape[1]
        scales, zeros = (
            each.float().repeat_interleave(self.group, dim=1)[:, :columns] for each in (self.scales, self.zeros)
        )
        return zeros + sliced(self.codes.float(), bits) * scales

    def stored_bytes(self, bits: int) -> int:
        """Of `bits` bit-planes with scales and zeros."""
        out_features, in_features = self.codes.shape
        return out_features * plane_columns(in_features) * bits // 8 + self.scales.numel() * _SCALE_AND_ZERO_BYTES


def sliced(codes: Tensor, bits: int) -> Tensor:
    """Codes of 8 bits as floats -> what their `bits` most significant bits stand for, as codes of 8 bits."""
    step = 1 << (PARENT_BITS - bits)
    return (codes / step).floor_().mul_(step).add_((step - 1) / 2)


def quantize(
    weight: Tensor,
    *,
    importance: Tensor | None = None,
    group: int = GPTQ_GROUP,
    widths: Sequence[int] = WIDTHS,
    emphasis: float = EMPHASIS,
) -> NestedUniform:
    """weight: [N, K], within float16; importance: [N, K] or [K], not negative; widths: those whose errors are minimised together, times emphasis^width.

    Raises PrecisionError.
    """
    factors = {bits: emphasis**bits for bits in widths}
    most, peak = torch.finfo(torch.float16).max, float(weight.abs().max())
    if not peak <= most:
        raise PrecisionError(f"the weight reaches {peak:g}, and zeros of groups (float16) hold at most {most:g}")
    out_features, in_features = weight.shape
    groups = -(-in_features // group)
    codes = torch.empty(out_features, groups * group, dtype=torch.uint8, device=weight.device)
    scales, zeros = (torch.empty(out_features, groups, dtype=torch.float16, device=weight.device) for _ in range(2))
    step = max(1, VALUES_AT_A_TIME // in_features)
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        values = weight[rows].float()
        weights = torch.ones_like(values) if importance is None else importance.expand_as(weight)[rows].float()
        padding = groups * group - in_features
        values = torch.cat([values, values[:, -1:].expand(-1, padding)], dim=1).view(-1, groups, group)
        weights = torch.nn.functional.pad(weights, (0, padding)).view(-1, groups, group)
        scale, zero = _best_range(values, weights, factors)
        scales[rows], zeros[rows] = scale, zero
        codes[rows] = _round(values, scale, zero).to(torch.uint8).flatten(1)
    return NestedUniform(codes[:, :in_features].contiguous(), scales, zeros, group)


def _best_range(values: Tensor, weights: Tensor, factors: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    """Scales and zeros float16 [R, G]: both ends of each group's range are shrunk together, then each by itself."""
    low, high = values.aminmax(dim=-1)
    best = values.new_full(low.shape, torch.inf)
    kept = (torch.ones_like(low), torch.ones_like(high))
    for ends in ((True, True), *((True, False), (False, True)) * ROUNDS):
        begun = kept
        for shrink in SHRINKS:
            tried = [torch.full_like(old, shrink) if end else old for end, old in zip(ends, begun, strict=True)]
            error = _error(values, weights, *_grid(low * tried[0], high * tried[1]), factors)
            better = error < best
            best = torch.where(better, error, best)
            kept = (torch.where(better, tried[0], kept[0]), torch.where(better, tried[1], kept[1]))
    return _grid(low * kept[0], high * kept[1])


def _grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero as they are stored; a group of equal values has a scale that still divides."""
    scale = ((high - low) / _TOP).to(torch.float16)
    tiny = torch.finfo(torch.float16).tiny
    return torch.where(scale > 0, scale, torch.full_like(scale, tiny)), low.to(torch.float16)


def _round(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((values - zero[..., None].float()) / scale[..., None].float()).round_().clamp_(0, _TOP)


def _error(values: Tensor, weights: Tensor, scale: Tensor, zero: Tensor, factors: Mapping[int, float]) -> Tensor:
    """[R, G]: the sum over widths of factor times weighted squared error."""
    codes = _round(values, scale, zero)
    exact = (values - zero[..., None].float()) / scale[..., None].float()
    total = torch.zeros_like(scale, dtype=torch.float32)
    for bits, factor in factors.items():
        missed = sliced(codes, bits).sub_(exact).square_().mul_(weights).sum(dim=-1)
        total += missed * factor
    return total * scale.float().square()
