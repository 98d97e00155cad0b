"""Modules of a stage whose weights are cut over its ranks: what each has computed is added up, or put side by side.

Put around what a rank holds by `model.divided`; the model that calls them knows nothing of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strata_runtime.ranges import Range
from strata_runtime.ranks.collectives import Collectives


class SummedLinear(nn.Module):
    """A linear of which every rank holds some inputs: [..., own K] -> [..., N], the sum of all ranks'."""

    def __init__(self, inner: nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.inner = inner  # stored in whatever format; replaced as the linears of a layer are
        self.collectives = collectives
        self.instead: Callable[[Tensor], Tensor] | None = None  # of the sum, while a layer runs another strategy

    def forward(self, inputs: Tensor) -> Tensor:
        if self.instead is not None:
            return self.instead(inputs)
        partial: Tensor = self.inner(inputs).contiguous()
        self.collectives.all_reduce(partial)
        return partial

    def largest(self, peaks: Tensor) -> Tensor:
        """What each rank has found of every row, [rows, 1] -> the largest of all ranks."""
        return self.collectives.gather(peaks.contiguous(), (1,) * self.collectives.ranks).amax(1, keepdim=True)


@dataclass(frozen=True, slots=True)
class NormOverAll:
    """Of a norm by root mean squares (arXiv 1910.07467) over `width` values, of which every rank holds some.

    rounds_first: whether what is normed is rounded to its inputs' type before it is weighed (Llama's, not OLMo 2's); counts: whether the values of
    this rank are added up from this rank, where others hold them too.
    """

    width: int
    epsilon: float
    rounds_first: bool
    counts: bool


class SummedNorm(nn.Module):
    """Such a norm on one rank: what ranks add up is one number a row."""

    def __init__(self, weight: nn.Parameter, norm: NormOverAll, collectives: Collectives) -> None:
        """weight: [own values]."""
        super().__init__()
        self.weight = weight
        self._norm = norm
        self._collectives = collectives

    def forward(self, values: Tensor) -> Tensor:
        """[..., own] -> [..., own]."""
        norm, wide = self._norm, values.float()
        squares = wide.pow(2).sum(-1, keepdim=True) * norm.counts
        self._collectives.all_reduce(squares)
        normed = wide * torch.rsqrt(squares / norm.width + norm.epsilon)
        return self.weight * normed.to(values.dtype) if norm.rounds_first else (self.weight * normed).to(values.dtype)


def gathered(
    forward: Callable[[Tensor], Tensor], collectives: Collectives, widths: tuple[int, ...]
) -> Callable[..., Tensor]:
    """The forward of a head of which every rank holds some outputs: [..., K] -> [..., N] of all ranks."""

    def whole(inputs: Tensor) -> Tensor:
        own = forward(inputs)
        flat = collectives.gather(own.reshape(-1, own.shape[-1]).contiguous(), widths)
        return flat.view(*own.shape[:-1], flat.shape[-1])

    return whole


def looked_up(forward: Callable[[Tensor], Tensor], collectives: Collectives, own: Range) -> Callable[..., Tensor]:
    """The forward of an embedding of which every rank holds some rows: ids of the whole vocabulary -> rows."""
    first, last = own

    def whole(ids: Tensor, *_: Any) -> Tensor:
        here = (ids >= first) & (ids < last)
        rows = forward((ids - first).clamp(0, last - first - 1))
        rows = torch.where(here[..., None], rows, 0).contiguous()
        collectives.all_reduce(rows)
        return rows

    return whole
