"""What ranks of one stage say to each other within a step: sums and gathers over all of them, in the same order on every rank.

A model's cut linears call these (`ranks.linears`); which memory or network lies below them they do not know: `ranks.shared_memory` on processors,
`ranks.process_group` on GPUs, and where the native library is not there.
"""

from typing import Protocol

from torch import Tensor

from strata_runtime.errors import StepError

PATIENCE_SECONDS = 10.0  # ranks are apart by far less, unless one hangs: they meet twice in every layer


class RankLostError(StepError):
    """A rank did not come to a collective, or all waiting was ended: the step, and with it the epoch, cannot go on."""


class Collectives(Protocol):
    """Of one rank. Every rank calls the same ones in the same order with tensors of the same shape; raises RankLostError."""

    rank: int
    ranks: int

    def join(self) -> None:
        """Before the first collective, on every rank, once all have loaded their parts."""

    def all_reduce(self, items: Tensor) -> None:
        """Replaced by their sums over all ranks, the same bits on each. items: contiguous."""

    def gather(self, items: Tensor, widths: tuple[int, ...]) -> Tensor:
        """items: [rows, widths[rank]], what each rank has computed of some columns -> [rows, sum of widths], on every rank."""

    def finish(self) -> None:
        """All that was asked for is computed: on a GPU calls come back before it is."""

    def end(self) -> None:
        """No rank waits for another any more, now or later. From any thread."""

    @property
    def shared_bytes(self) -> int:
        """Memory that ranks share and that is private to no process."""


class RowCollectives(Collectives, Protocol):
    """Those that other strategies than Megatron need as well."""

    def reduce_scatter(self, items: Tensor) -> Tensor:
        """items: [rows, N] -> the sums over all ranks of this one's share of the rows (`ranks.cut.share`): [own rows, N], as `all_reduce` rounds them."""

    def gather_rows(self, own: Tensor, rows: int) -> Tensor:
        """own: [own rows, N] -> [rows, N], every rank's share of the rows."""
