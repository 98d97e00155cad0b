"""Draft rounds: what a small model beside the leader is asked to draft before a step verifies it. Made by the scheduler, run by the leader's drafter.

The small model keeps keys and values in a pool of its own, under the numbers of the replica's blocks: what a block holds of a text for the stages it
holds for that model too, once `BlockPool.drafted` has it. So nothing of it is given out, freed or shortened apart, and what is not known is computed.
Knows no tensors.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import NamedTuple

from strata_planner.contract.frames import Sampling
from strata_runtime.scheduler.blocks import BlockPool
from strata_runtime.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Of one sequence: compute `tokens`, the first at position `start`, then draft `count` behind them; 0: its text is not all there yet.

    `blocks`: its whole table.
    """

    sequence: int
    start: int
    tokens: list[int]
    count: int
    blocks: tuple[int, ...]
    sampling: Sampling

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def from_position(self, first: int) -> "DraftTask":
        """Without its tokens before that."""
        late = max(0, first - self.start)
        return replace(self, start=self.start + late, tokens=self.tokens[late:]) if late else self


DraftRound = tuple[DraftTask, ...]


class Drafted(NamedTuple):
    """What came of a round: the tokens of each task, and seconds of all of it."""

    tokens: Listed[list[int]]
    seconds: float


Draft = Callable[[DraftRound], Drafted]  # by the small model


def draft_start(sequence: Sequence, pool: BlockPool, page_tokens: int) -> int:
    """The first position that the small model has to compute: at most that of the text's last token, whose draw is wanted."""
    known = sequence.draft_computed
    while known % page_tokens == 0 and known + page_tokens < len(sequence.tokens):
        if sequence.blocks[known // page_tokens] not in pool.drafted:
            break
        known += page_tokens
    return min(known, len(sequence.tokens) - 1)


def lengths(starts: Listed[tuple[Sequence, int]], most: int) -> list[tuple[Sequence, int, int]]:
    """(sequence, start, tokens to compute), at most so many in all: those that need least first, so that none waits for a long prompt."""
    chosen = []
    for sequence, start in sorted(starts, key=lambda each: len(each[0].tokens) - each[1]):
        length = min(len(sequence.tokens) - start, most)
        most -= length
        chosen.append((sequence, start, length))
    return chosen


def know(sequence: Sequence, end: int, pool: BlockPool, page_tokens: int) -> None:
    """The small model has the text's keys and values up to `end`: blocks that are full by it serve others too."""
    pool.drafted.update(sequence.blocks[sequence.draft_computed // page_tokens : end // page_tokens])
    sequence.draft_computed = end
