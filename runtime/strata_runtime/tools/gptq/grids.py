"""Where the steps of a group lie: scale and zero, chosen before its weights are rounded. Rounding to nearest on such grids is here too.

Called by `solver`. All matrices are [K, N]: inputs outermost, so that what is rounded at once is contiguous. A range is narrowed where that
lowers the squared error, weighed by how much each input matters (the diagonal of the Hessian), as auto-gptq's `mse` does unweighted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


@dataclass(frozen=True)
class Grid:
    """scales, zeros: float32 [N]; scales as float16 holds them. Codes are 0..top."""

    scales: Tensor
    zeros: Tensor
    top: int

    def codes(self, values: Tensor) -> Tensor:
        """values [..., N] -> codes as float32."""
        return (values / self.scales).round_().add_(self.zeros).clamp_(0, self.top)

    def values(self, codes: Tensor) -> Tensor:
        return (codes - self.zeros) * self.scales


def best_grid(values: Tensor, importance: Tensor, bits: int, *, symmetric: bool) -> Grid:
    """values: [inputs of the group, N]; importance: [inputs], at least 0. The range with the least weighed squared error, per output."""
    low, high = values.amin(dim=0).clamp_max_(0), values.amax(dim=0).clamp_min_(0)
    best = _grid(low, high, bits, symmetric=symmetric)
    best_error = _error(best, values, importance)
    for ratio in CLIP_RATIOS[1:]:
        grid = _grid(low * ratio, high * ratio, bits, symmetric=symmetric)
        error = _error(grid, values, importance)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = Grid(
            torch.where(better, grid.scales, best.scales), torch.where(better, grid.zeros, best.zeros), best.top
        )
    return best


def _grid(low: Tensor, high: Tensor, bits: int, *, symmetric: bool) -> Grid:
    top = (1 << bits) - 1
    if symmetric:
        scales = _stored(2 * torch.maximum(high, -low) / top)
        return Grid(scales, torch.full_like(scales, 1 << (bits - 1)), top)
    scales = _stored((high - low) / top)
    return Grid(scales, (-low / scales).round_().clamp_(0, top), top)


def _error(grid: Grid, values: Tensor, importance: Tensor) -> Tensor:
    """[N]."""
    return importance @ (grid.values(grid.codes(values)) - values).square_()


def _stored(scales: Tensor) -> Tensor:
    """As float16 holds them, and never zero: a constant or tiny group gets a scale that still divides."""
    rounded = scales.to(torch.float16)
    return rounded.clamp_min_(torch.finfo(torch.float16).tiny).float()
