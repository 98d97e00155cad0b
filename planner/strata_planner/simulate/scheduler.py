"""The leader's scheduler without tokens: which sequences the next micro-batch carries. Called by `leader` at every step.

A second writing of the runtime's scheduler/scheduler.py, rule by rule (a test runs both on the same requests): admission first come
first served by the blocks of a prompt, decode first in micro-batches cut over the stages, prompts in chunks up to the plan's token
limit, the last to come computed again where no block is left. Requests here have nothing in common, so that no block is shared, and
are equally important. Knows no clock.
"""

import math
from bisect import insort
from collections import deque

from strata_planner.contract.steps import (
    WATERMARK,
    Pace,
    chunk_of,
    fewest_tokens,
    filled,
    part_of_the_oldest,
    prompts_of_a_step,
    rows_of_a_step,
)
from strata_planner.simulate.replica import Limits
from strata_planner.simulate.stage import Batch, Chunk
from strata_planner.simulate.trace import Request


class Sequence:
    """A request as the leader runs it, and when its tokens came."""

    __slots__ = (
        "awaited",
        "blocks",
        "computed",
        "finished_at",
        "first_token_at",
        "number",
        "produced",
        "promised",
        "rank",
        "replica",
        "request",
    )

    def __init__(self, number: int, request: Request) -> None:
        self.number = number  # its place in the trace
        self.request = request
        self.replica = -1
        self.rank = -1  # in the order of arrival at its leader
        self.blocks = 0
        self.promised = 0  # blocks that its prompt is still to take
        self.computed = 0  # positions whose KV exists or is on its way
        self.produced = 0
        self.awaited = False  # a token of it is being sampled
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def remaining(self) -> int:
        """Tokens to be computed before the next one can be sampled."""
        return self.request.prompt_tokens + self.produced - self.computed


class Scheduler:
    """Sequences wait, prefill, then decode; a decoding one is ready unless a token of it is being sampled."""

    def __init__(self, limits: Limits, under_way: int) -> None:
        self._limits = limits
        self._under_way = under_way
        self._free = limits.page_budget
        self._promised = 0
        self._arrived = 0
        self._running: dict[int, Sequence] = {}  # by rank
        self._prefilling: list[Sequence] = []  # by rank
        self._ready: deque[Sequence] = deque()
        self.waiting: list[Sequence] = []  # by rank
        self.preemptions = 0
        self.pace = Pace()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def held_blocks(self) -> int:
        return self._limits.page_budget - self._free

    def add(self, sequence: Sequence) -> None:
        if sequence.rank < 0:
            sequence.rank = self._arrived
            self._arrived += 1
        insort(self.waiting, sequence, key=_rank)

    def take(self, sequence: Sequence) -> None:
        """A token of it has been sampled; the caller has counted it, and `remove`s it if it was the last."""
        sequence.awaited = False
        if sequence.rank in self._running:
            self._ready.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Its last token has been taken."""
        if sequence.rank in self._running:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)

    def next_batch(self) -> tuple[Batch, list[Sequence]] | None:
        """The next micro-batch and the sequences that it samples a token of; None if nothing is ready."""
        self._admit()
        sampled = self._decoding()
        count = len(sampled)
        keys = 0
        for sequence in sampled:
            self._advance(sequence, 1)
            keys += sequence.computed
        if not self._prefilling:
            return (Batch(count, count, count, keys), sampled) if count else None
        chunks = self._chunks(self._prompt_budget(count), self._limits.micro_batch.most_prompts(count), sampled)
        tokens = count + sum(chunk.tokens for chunk in chunks)
        return (Batch(tokens, len(sampled), count, keys, chunks), sampled) if tokens else None

    def _stop(self, sequence: Sequence) -> None:
        del self._running[sequence.rank]
        for queue in (self._prefilling, self._ready):
            if sequence in queue:
                queue.remove(sequence)
        self._free += sequence.blocks
        self._promised -= sequence.promised
        sequence.blocks = sequence.promised = sequence.computed = 0

    def _admit(self) -> None:
        most = self._limits.state_slots or math.inf
        while self.waiting and not self.waiting[0].awaited and len(self._running) < most:
            pages = self._limits.pages(self.waiting[0].remaining)
            spare = self._free - self._promised - pages
            if self._running and spare < WATERMARK * self._limits.page_budget:
                return
            sequence = self.waiting.pop(0)
            self._running[sequence.rank] = sequence
            sequence.promised = pages
            self._promised += pages
            insort(self._prefilling, sequence, key=_rank)

    def _decoding(self) -> list[Sequence]:
        ready = self._ready
        share = -(-(len(self._running) - len(self._prefilling)) // self._under_way)
        count = min(len(ready), self._limits.micro_batch.decode, max(share, 1))
        picked = [ready.popleft() for _ in range(count)]
        while sum(map(self._lacks_a_block, picked)) > self._free - self._promised:
            last = self._running[max(self._running)]
            if last in picked:
                picked.remove(last)
            self.preemptions += 1
            self._stop(last)
            self.add(last)
        return self._decoding() if ready and not picked else picked

    def _prompt_budget(self, rows: int) -> int:
        budget = self._limits.micro_batch.max_step_tokens - rows
        if len(self._running) == len(self._prefilling):
            return budget
        first_tokens = len(self._prefilling) + len(self.waiting)
        planned = self._limits.micro_batch
        decoding = len(self._running) - len(self._prefilling)
        brought = planned.prompts_per_token * rows_of_a_step(decoding, self._under_way, planned.decode)
        part = filled(len(self._running) + len(self.waiting), planned.decode)
        least = planned.least_prompt_tokens
        fewest = fewest_tokens(len(self._prefilling), self._limits.page_tokens, brought, part, least)
        return int(min(budget, max(fewest, self.pace.tokens(max(rows, 1), first_tokens))))

    def _lacks_a_block(self, sequence: Sequence) -> bool:
        return sequence.blocks * self._limits.page_tokens == sequence.computed

    def _advance(self, sequence: Sequence, length: int) -> None:
        sequence.computed += length
        more = self._limits.pages(sequence.computed) - sequence.blocks
        kept = min(sequence.promised, more)
        sequence.blocks += more
        self._free -= more
        sequence.promised -= kept
        self._promised -= kept
        sequence.awaited = sequence.remaining == 0

    def _chunks(self, budget: int, most: int, sampled: list[Sequence]) -> tuple[Chunk, ...]:
        """Of the first in rank and of those that need least; sequences that end their prompts here are added to `sampled`."""
        if budget <= 0:
            return ()
        chunks: list[Chunk] = []
        oldest = self._prefilling[0]
        is_alone = len(self._prefilling) == 1
        size = self._limits.page_tokens
        kept = part_of_the_oldest(oldest, budget, size)
        budget -= kept
        for sequence in prompts_of_a_step(self._prefilling, most):
            is_oldest = sequence is oldest
            most_tokens = budget + kept if is_oldest else budget
            length = chunk_of(sequence, most_tokens, size, is_oldest=is_oldest, is_alone=is_alone)
            if length <= 0:
                continue
            budget -= max(0, length - kept) if is_oldest else length
            chunks.append(Chunk(length, sequence.computed))
            self._advance(sequence, length)
            if sequence.awaited:
                self._prefilling.remove(sequence)
                sampled.append(sequence)
        return tuple(chunks)


def _rank(sequence: Sequence) -> int:
    return sequence.rank
