"""Round-to-nearest quantizers: a weight matrix in, integer codes with their scales and zeros out.

Called by `linear.make_linear` while a checkpoint streams in. Knows nothing of how codes are packed or multiplied.
Deterministic: the same weight gives the same codes on every run, whatever the number of rows at a time.

Groups of the asymmetric formats hold `weight = (code - CODE_OFFSET) * scale + zero`, the convention of torch's int4 kernels;
three bits use it too (codes 0..7), so that one kernel serves both. The range of a group is clipped where that lowers its squared
error (a grid over the clipping ratio, as in OCTAV, Sakr et al. 2022, and AWQ, Lin et al. 2024, section 3.2).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strata_runtime.kernels import native_rounding

Sharing = Literal["channel", "tensor"]

CODE_OFFSET = 8
CLIP_RATIOS = (1.0, 0.92, 0.84, 0.76)  # error of normal weights: -5 % at 4 bits, -14 % at 3, for 1.8 times the time
VALUES_AT_A_TIME = 1 << 18  # the temporaries of the search stay within the cache


@dataclass(frozen=True)
class GroupCodes:
    """Codes uint8 [N, K], scales and zeros [N, K / group] in the compute type."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor


@dataclass(frozen=True)
class ChannelCodes:
    """Codes int8 [N, K] within -127..127, a scale per output [N]: `weight = code * scale`."""

    codes: Tensor
    scales: Tensor


def quantize_channels(
    weight: Tensor, scale_dtype: torch.dtype, *, sharing: Sharing = "channel", factors: Tensor | None = None
) -> ChannelCodes:
    """Symmetric. weight: [N, K], finite, any floating type; factors: [K], what its columns are multiplied by first.

    `sharing`: a scale for each output, or one value for all of them (per tensor), which [N] scales then repeat.
    """
    if sharing == "channel" and factors is None and native_rounding.takes(weight, scale_dtype):
        return ChannelCodes(*native_rounding.quantize_channels(weight, scale_dtype))
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    slices = _row_slices(weight)

    def values(rows: slice) -> Tensor:
        return weight[rows].float() if factors is None else weight[rows].float() * factors.float()

    if factors is None:
        peaks = torch.maximum(
            weight.amax(dim=1), -weight.amin(dim=1)
        ).float()  # `aminmax` along rows takes seven times as long
    else:
        peaks = torch.cat([values(rows).abs().amax(dim=1) for rows in slices])
    if sharing == "tensor":
        peaks = peaks.amax().expand_as(peaks)
    scales = _positive(peaks / 127.0, scale_dtype)
    for rows in slices:
        codes[rows] = (values(rows) / scales[rows, None].float()).round_().clamp_(-127, 127).to(torch.int8)
    return ChannelCodes(codes, scales)


def quantize_groups(weight: Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> GroupCodes:
    """Asymmetric groups along the inputs. weight: [N, K], finite, K a multiple of `group`.

    Natively where the library takes it, a ninth of the time: the same codes, but for groups of which two ranges have the same error.
    """
    if native_rounding.takes_groups(weight, group, scale_dtype):
        return GroupCodes(*native_rounding.quantize_groups(weight, bits, group, scale_dtype, CLIP_RATIOS))
    out_features, in_features = weight.shape
    groups = in_features // group
    codes = torch.empty(out_features, groups, group, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_features, groups, dtype=scale_dtype, device=weight.device)
    zeros = torch.empty_like(scales)
    for rows in _row_slices(weight):
        values = weight[rows].float().reshape(-1, groups, group)
        codes[rows], scales[rows], zeros[rows] = _best_clip(values, (1 << bits) - 1, scale_dtype)
    return GroupCodes(codes.view(out_features, in_features), scales, zeros)


def _best_clip(values: Tensor, top: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of the clipping ratio with the least squared error, per group. values: [rows, G, group]."""
    low, high = values.amin(dim=-1), values.amax(dim=-1)
    best_codes, scale, zero, best_error = _round_to_grid(values, low, high, top, scale_dtype)
    for ratio in CLIP_RATIOS[1:]:
        codes, new_scale, new_zero, error = _round_to_grid(values, low * ratio, high * ratio, top, scale_dtype)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_codes = torch.where(better[..., None], codes, best_codes)
        scale, zero = torch.where(better, new_scale, scale), torch.where(better, new_zero, zero)
    return best_codes.to(torch.uint8), scale, zero


def _round_to_grid(
    values: Tensor, low: Tensor, high: Tensor, top: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (as floats), scale, zero and squared error with the scale and zero as they will be stored."""
    scale = _positive((high - low) / top, scale_dtype)
    step = scale.float()
    zero = (low + CODE_OFFSET * step).to(scale_dtype)
    origin = zero.float() - CODE_OFFSET * step  # the value of code 0 after rounding
    codes = ((values - origin[..., None]) / step[..., None]).round_().clamp_(0, top)
    error = torch.addcmul(origin[..., None], codes, step[..., None]).sub_(values).square_().sum(dim=-1)
    return codes, scale, zero, error


def _positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A constant group has a range of zero, and a tiny one may round to zero: both get a scale that still divides."""
    rounded = scale.to(dtype)
    return torch.where(rounded > 0, rounded, torch.full_like(rounded, torch.finfo(dtype).tiny))


def _row_slices(weight: Tensor) -> list[slice]:
    step = max(1, VALUES_AT_A_TIME // max(1, weight.shape[1]))
    return [slice(start, start + step) for start in range(0, weight.shape[0], step)]
