"""The rules by which a leader fills its steps: the runtime's scheduler follows them, the planner's simulator too."""

import math
from collections.abc import Sequence
from heapq import nsmallest
from typing import Protocol, TypeVar

from strata_planner.contract.rows import padded_rows

WATERMARK = 0.01  # of all blocks: free when a prompt is admitted, so that it does not drive out another at once
FEWEST_PROMPTS = 2  # that a step takes if there are so many: a small one is not behind a large one
DRAFT_ROWS = (
    16  # rows that a step may want logits of, where it has fewer sequences: of drafted tokens, or of a prompt's own
)
FEWEST_TOKENS = 4  # of the prompt that is first in rank, which go on in any step
OLDEST_SHARE = 4  # the prompt that is first in rank gets at least one part in so many of what prompts have of a step

KEEPS_UP = 3  # times what the workload brings, under its full load: what has come together is worked off
STREAMS_PART = 0.8  # of the seconds that streams were promised: the rest is for what steps vary by
_BLAME = 0.3  # share of a step's surprise that is believed at once
_SURE = 0.1  # share of it that rows take which were seen alone


class Prompt(Protocol):
    """A sequence of which tokens are to be computed before the next one can be sampled."""

    computed: int

    @property
    def remaining(self) -> int: ...


P = TypeVar("P", bound=Prompt)


def prompts_of_a_step(by_rank: Sequence[P], most: int) -> list[P]:
    """Those that need least first, the first in rank among them whatever it needs."""
    oldest, *others = by_rank
    others = nsmallest(most - 1, others, key=_remaining)
    return sorted([oldest, *others], key=_remaining)


def rows_of_a_step(decoding: int, under_way: int, most: int) -> float:
    """Of so many sequences that decode, in the mean over all steps under way, also over those that none is left for. Steps without a row would
    otherwise carry less of a prompt than their neighbours, and wait for them.
    """
    return min(decoding / under_way, most)


def fewest_tokens(prompts: int, page_tokens: int, brought: float, filled: float, least: int = 0) -> int:
    """Of prompts in any step, however long it gets: some of the first in rank, and a block of another where others wait for theirs; or some more than the
    workload brings while a step's rows decode (`brought`). Plans are told for steps of that mix: with fewer, more and more requests would wait. Of
    micro-batches that are `filled` in part as large a part of that: where few requests are, a prompt keeps nobody waiting, and streams keep their pace.
    `least`: of a plan, `MicroBatch.least_prompt_tokens`.
    """
    beside = math.ceil(KEEPS_UP * filled * brought)
    return max(min(FEWEST_TOKENS, page_tokens) + page_tokens * (prompts > 1), beside, least)


def filled(requests: int, decode: int) -> float:
    """The share of micro-batches of `decode` sequences that so many requests fill, of as few as hold them."""
    return requests / (decode * -(-requests // decode)) if requests else 0.0


def part_of_the_oldest(oldest: Prompt, budget: int, page_tokens: int) -> int:
    """Tokens of what prompts have of a step that are kept for the first in rank."""
    return min(budget, oldest.remaining, max(min(FEWEST_TOKENS, page_tokens), budget // OLDEST_SHARE))


def chunk_of(prompt: Prompt, budget: int, page_tokens: int, *, is_oldest: bool, is_alone: bool) -> int:
    """Tokens of a prompt's next chunk: all that remain, or up to the end of a block, where others may go on. A little of a block is worth
    its attention for the first in rank alone, which moves in every step. Where no other goes on, blocks do not matter either. What does
    not fit goes in equal parts, so that none of these steps is longer than it need be.
    """
    if prompt.remaining <= budget:
        return prompt.remaining
    end = prompt.computed + budget
    whole = end - end % page_tokens
    if whole > prompt.computed and not is_alone:
        return whole - prompt.computed
    if not is_oldest:
        return 0
    left = prompt.remaining if is_alone else min(page_tokens - prompt.computed % page_tokens, prompt.remaining)
    return -(-left // -(-left // budget))


def _remaining(prompt: Prompt) -> int:
    return prompt.remaining


class Pace:
    """How many tokens of prompts go into a step beside sequences that decode, so that streams keep their pace.

    While one request waits for its first token, a step takes at most twice as long as one that only decodes; while n do, 1 + n times:
    where many wait, streams slow down for them instead of keeping them out. Learns from the steps themselves; before it has seen
    any, and where nothing decodes, nothing is bounded.

    What a step takes is told as seconds of its decoding rows (for each padded number of them) + seconds of a token x tokens of prompts. How
    much longer or shorter it took is put down to both in the proportion of their shares, so that either is known also where every
    step carries both. Rows whose steps were seen without a prompt take little of it: a prompt's tokens get dearer towards its end, where they attend
    to more. A step without such rows reads the weights too: it has the seconds of one row, so that few tokens alone do not
    seem to take all of it each.
    """

    def __init__(self) -> None:
        self._rows: dict[int, float] = {}  # seconds, by padded rows
        self._token = 0.0  # further seconds for each token of a prompt
        self._met: set[int] = set()
        self._alone: set[int] = set()  # padded rows whose steps were seen without a prompt

    def learn(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A step has come back: rows that decoded in it, tokens of prompts, and seconds of the stage that took longest."""
        if not 0 < seconds < float("inf") or self._is_first(rows + prompt_tokens):  # stages say it: it may be anything
            return
        size, prompts = padded_rows(rows), self._token * prompt_tokens
        if rows and prompt_tokens and not (self._token or self._rows):
            return  # nothing tells the one from the other
        if rows and size not in self._rows:  # what is new is put down to it
            self._rows[size] = self.decoding(rows)
            if self._token or not prompt_tokens:
                self._rows[size] = max(seconds - prompts, self._rows[size], seconds / 10)
        alone = self._rows[size] if rows else self.decoding(1)
        if prompt_tokens and not self._token:
            self._token = max(seconds - alone, seconds / 2) / prompt_tokens
            prompts = self._token * prompt_tokens
        surprise = _BLAME * (seconds / (alone + prompts) - 1) / (alone + prompts)
        if rows:
            believed = _SURE if prompt_tokens and size in self._alone else 1.0
            self._rows[size] *= 1 + surprise * alone * believed
            self._alone |= {size} if not prompt_tokens else set()
        self._token *= 1 + surprise * prompts

    def decoding(self, rows: int) -> float:
        """Seconds of a step of so many decoding rows alone; of a number that was never seen, those of the next smaller one. 0: nothing was seen."""
        size = padded_rows(rows)
        below = max((each for each in self._rows if each <= size), default=None)
        return self._rows[below] if below is not None else min(self._rows.values(), default=0.0)

    def knows(self, rows: int) -> bool:
        return padded_rows(rows) in self._rows

    def tokens(self, rows: int, waiting: int) -> float:
        """Most tokens of prompts beside so many rows, while so many requests wait for their first token."""
        alone = self.decoding(rows)
        if not alone or not self._token:
            return float("inf")
        return STREAMS_PART * waiting * alone / self._token

    def _is_first(self, rows: int) -> bool:
        """The first step of a number of rows is longer: a processor makes its kernels then."""
        size = padded_rows(rows)
        is_new = size not in self._met
        self._met.add(size)
        return is_new
