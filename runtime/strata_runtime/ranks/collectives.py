"""What ranks of one stage say to each other within a step: sums and gathers over all of them, in the same order on every rank.

A model's cut linears call these (`ranks.linears`); which memory or network lies below them they do not know.
"""

from typing import Protocol

from torch import Tensor

from strata_runtime.errors import StepError


class RankLostError(StepError):
    """A rank did not come to a collective, or all waiting was ended: the step, and with it the epoch, cannot go on."""


class Collectives(Protocol):
    """Of one rank. Every rank calls the same ones in the same order with tensors of the same shape; raises RankLostError."""

    rank: int
    ranks: int

    def all_reduce(self, items: Tensor) -> None:
        """Replaced by their sums over all ranks, the same bits on each. items: contiguous."""

    def gather(self, items: Tensor, widths: tuple[int, ...]) -> Tensor:
        """items: [rows, widths[rank]], what each rank has computed of some columns -> [rows, sum of widths], on every rank."""

    def reduce_scatter(self, items: Tensor) -> Tensor:
        """items: [rows, N] -> the sums over all ranks of this one's share of the rows (`ranks.cut.share`): [own rows, N], as `all_reduce` rounds them."""

    def gather_rows(self, own: Tensor, rows: int) -> Tensor:
        """own: [own rows, N] -> [rows, N], every rank's share of the rows."""

    def end(self) -> None:
        """No rank waits for another any more, now or later. From any thread."""
