"""GPTQ: rounds the inputs of a weight one after the other and moves each one's error to those that follow, by the Hessian of its inputs.

Called for each linear by `calibrated`. Frantar et al., arXiv 2210.17323, algorithm 1: the Cholesky factor of the inverse Hessian, blocks of 128
inputs, updates of all that follows a block at once; inputs in descending order of the Hessian's diagonal (act-order), groups by that order or, static,
by the model's own. Knows nothing of models and of files.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from strata_planner.contract.formats import GPTQ
from strata_runtime.formats.errors import PrecisionError, WeightNotFiniteError
from strata_runtime.formats.gptq.codes import GptqCodes, group_of_inputs
from strata_runtime.tools.gptq.grids import Grid, best_grid

BLOCK = 128
_MOST_DAMP = 1.0


@dataclass(frozen=True)
class GptqSettings:
    """`group`: inputs that share a scale, None: all. `act_order`: what matters most is rounded first. `static_groups`: groups are runs of inputs
    even so, and need no order when they run. `damp`: what is added to the Hessian's diagonal, as a share of its mean.
    """

    bits: int
    group: int | None = 128
    symmetric: bool = True
    act_order: bool = True
    static_groups: bool = True
    damp: float = 0.01

    def __post_init__(self) -> None:
        if self.bits not in GPTQ:
            raise PrecisionError(f"GPTQ to {self.bits} bits: choose from {', '.join(map(str, GPTQ))}")
        if self.group is not None and self.group < 1:
            raise PrecisionError(f"groups of {self.group} inputs: at least 1, or None for whole rows")
        if not 0 < self.damp <= _MOST_DAMP:
            raise PrecisionError(f"damp {self.damp}: more than 0 and at most {_MOST_DAMP} of the mean is needed")

    @property
    def ordered(self) -> bool:
        """Whether groups are not runs of inputs."""
        return self.act_order and not self.static_groups and self.group is not None


def quantize_gptq(weight: Tensor, hessian: Tensor, settings: GptqSettings, *, name: str = "linear") -> GptqCodes:
    """weight: [N, K]; hessian: [K, K], the sum of x x^T over tokens, of any scale.

    No output's error (weighted by the Hessian) is larger than that of rounding to nearest on grids of the same groups: where it would be, that is
    taken. Raises WeightNotFiniteError, and PrecisionError for a Hessian of another shape.
    """
    _check(weight, hessian, name)
    values, factors = weight.detach().float().t().contiguous(), hessian.detach().float()
    importance = factors.diagonal().clone()
    order = torch.arange(len(importance), device=weight.device)
    if settings.act_order:
        order = importance.argsort(descending=True, stable=True)
    groups = _groups(order, settings)
    solved = _solve(values, factors, order, groups, settings)
    nearest = _nearest(values, importance, groups, settings)
    return _better(values, factors, solved, nearest, groups, settings.bits)


def round_to_nearest(weight: Tensor, settings: GptqSettings, importance: Tensor | None = None) -> GptqCodes:
    """The same grids without moving errors: what GPTQ gives for a diagonal Hessian. Groups are runs of inputs.

    weight: [N, K]; importance: [K], the Hessian's diagonal; None: all inputs matter alike.
    """
    values = weight.detach().float().t().contiguous()
    matter = values.new_ones(values.shape[0]) if importance is None else importance.float()
    groups = group_of_inputs(values.shape[0], settings.group or values.shape[0], device=weight.device)
    found = _nearest(values, matter, groups, settings)
    scales = found.scales.t().to(torch.float16).contiguous()
    return GptqCodes(settings.bits, _columns(found.codes), scales, _columns(found.zeros), groups)


@dataclass
class _Rounded:
    """codes: float32 [K, N]; scales and zeros: float32 [G, N]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @classmethod
    def empty(cls, values: Tensor, count: int) -> "_Rounded":
        outputs = values.shape[1]
        return cls(torch.empty_like(values), values.new_empty(count, outputs), values.new_empty(count, outputs))

    def keep(self, group: int, grid: Grid) -> Grid:
        self.scales[group], self.zeros[group] = grid.scales, grid.zeros
        return grid

    def grid(self, group: int, bits: int) -> Grid:
        return Grid(self.scales[group], self.zeros[group], (1 << bits) - 1)

    def errors(self, values: Tensor, factors: Tensor, groups: Tensor) -> Tensor:
        """Weighted by the Hessian: [N]."""
        index = groups.long()
        moved = (self.codes - self.zeros[index]).mul_(self.scales[index]).sub_(values)
        return (moved * (factors @ moved)).sum(dim=0)


def _groups(order: Tensor, settings: GptqSettings) -> Tensor:
    """int32 [K]."""
    count = len(order)
    groups = group_of_inputs(count, settings.group or count, device=order.device)
    if not settings.ordered:
        return groups
    by_order = torch.empty_like(groups)
    by_order[order] = groups
    return by_order


def _nearest(values: Tensor, importance: Tensor, groups: Tensor, settings: GptqSettings) -> _Rounded:
    rounded = _Rounded.empty(values, int(groups.max()) + 1)
    for group in range(rounded.scales.shape[0]):
        members = (groups == group).nonzero().flatten()
        grid = best_grid(values[members], importance[members], settings.bits, symmetric=settings.symmetric)
        rounded.codes[members] = rounded.keep(group, grid).codes(values[members])
    return rounded


def _solve(values: Tensor, factors: Tensor, order: Tensor, groups: Tensor, settings: GptqSettings) -> _Rounded:
    """Algorithm 1 on the inputs in `order`. Groups that are not static get their grid when their turn comes, of weights moved so far."""
    ordered, group_of, importance = values[order], groups[order].tolist(), factors.diagonal()[order]
    inverse = _inverse_factor(factors[order][:, order], settings.damp)
    rounded = _Rounded.empty(values, int(groups.max()) + 1)
    size = settings.group or len(order)
    if settings.static_groups:
        rounded = _nearest(values, factors.diagonal(), groups, settings)
    for start, stop in _blocks(len(order), None if settings.static_groups else size):
        if not settings.static_groups and start % size == 0:
            members = slice(start, start + size)
            grid = best_grid(ordered[members], importance[members], settings.bits, symmetric=settings.symmetric)
            rounded.keep(group_of[start], grid)
        block, errors = ordered[start:stop], torch.empty_like(ordered[start:stop])
        for place in range(stop - start):
            grid, factor = rounded.grid(group_of[start + place], settings.bits), inverse[start + place, start:stop]
            codes = grid.codes(block[place])
            rounded.codes[order[start + place]] = codes
            errors[place] = (block[place] - grid.values(codes)) / factor[place]
            block[place:].addr_(factor[place:], errors[place], alpha=-1)
        ordered[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
    return rounded


def _blocks(count: int, group: int | None) -> list[tuple[int, int]]:
    """Cut after every BLOCK inputs, and where groups begin: then nothing is owed to the weights whose range is taken."""
    cuts = {*range(0, count, BLOCK), *(range(0, count, group) if group else ()), count}
    ends = sorted(cuts)
    return list(pairwise(ends))


def _inverse_factor(factors: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian; damped more where rounding errors leave it indefinite."""
    mean = float(factors.diagonal().mean()) or 1.0
    while damp <= _MOST_DAMP:
        damped = factors.clone()
        damped.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damp *= 10
    # So little is known of how inputs move together that each is rounded for itself.
    return torch.diag(factors.diagonal().add(mean).rsqrt())


def _better(
    values: Tensor, factors: Tensor, solved: _Rounded, nearest: _Rounded, groups: Tensor, bits: int
) -> GptqCodes:
    """Output by output the one with the smaller error."""
    worse = solved.errors(values, factors, groups) > nearest.errors(values, factors, groups)
    return GptqCodes(
        bits=bits,
        codes=_columns(torch.where(worse, nearest.codes, solved.codes)),
        scales=torch.where(worse, nearest.scales, solved.scales).t().to(torch.float16).contiguous(),
        zeros=_columns(torch.where(worse, nearest.zeros, solved.zeros)),
        groups=groups,
    )


def _columns(codes: Tensor) -> Tensor:
    """float32 [M, N] of whole numbers -> uint8 [N, M]."""
    return codes.t().to(torch.uint8).contiguous()


def _check(weight: Tensor, hessian: Tensor, name: str) -> None:
    if weight.ndim != 2 or hessian.shape != (weight.shape[1],) * 2:
        raise PrecisionError(
            f"{name}: weight {list(weight.shape)} and Hessian {list(hessian.shape)}; [N, K] and [K, K] are needed"
        )
    for kind, values in (("weight", weight), ("Hessian", hessian)):
        broken = int((~torch.isfinite(values)).sum())
        if broken:
            raise WeightNotFiniteError(f"{name}: {broken} of {values.numel()} values of the {kind} are NaN or infinite")
