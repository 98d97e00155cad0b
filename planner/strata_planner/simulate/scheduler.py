"""The leader's scheduler without tokens: which sequences the next micro-batch carries. Called by `leader` at every step.

A second writing of the runtime's scheduler/scheduler.py, rule by rule (a test runs both on the same requests): admission first come
first served by pages for the longest length, decode first in micro-batches cut over the stages, prompts in chunks up to the
plan's token limit. Nothing is preempted, since what is admitted has its pages. Knows no clock.
"""

from collections import deque

from strata_planner.simulate.replica import Limits
from strata_planner.simulate.stage import Batch, Chunk
from strata_planner.simulate.trace import Request


class Sequence:
    """A request as the leader runs it, and when its tokens came."""

    __slots__ = ("computed", "finished_at", "first_token_at", "number", "pages", "produced", "replica", "request")

    def __init__(self, number: int, request: Request) -> None:
        self.number = number  # its place in the trace
        self.request = request
        self.replica = -1
        self.pages = 0
        self.computed = 0  # positions whose KV exists or is on its way
        self.produced = 0
        self.first_token_at: float | None = None
        self.finished_at: float | None = None


class Scheduler:
    """Sequences wait, prefill, then decode; a decoding one is ready unless a token of it is being sampled."""

    def __init__(self, limits: Limits, under_way: int) -> None:
        self._limits = limits
        self._under_way = under_way
        self.waiting: deque[Sequence] = deque()
        self.reserved_pages = 0
        self.running = 0
        self._prefilling: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        sequence.pages = self._limits.pages(sequence.request.longest)
        self.waiting.append(sequence)

    def ready_again(self, sequence: Sequence) -> None:
        self._ready.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Its last token has been sampled."""
        self.running -= 1
        self.reserved_pages -= sequence.pages

    def next_batch(self) -> tuple[Batch, list[Sequence]] | None:
        """The next micro-batch and the sequences that it samples a token of; None if nothing is ready."""
        self._admit()
        sampled = self._decoding()
        count = len(sampled)
        keys = 0
        for sequence in sampled:
            sequence.computed += 1
            keys += sequence.computed
        if not self._prefilling:
            return (Batch(count, count, count, keys), sampled) if count else None
        chunks = self._chunks(self._limits.micro_batch.max_step_tokens - count, sampled)
        tokens = count + sum(chunk.tokens for chunk in chunks)
        return (Batch(tokens, len(sampled), count, keys, chunks), sampled) if tokens else None

    def _admit(self) -> None:
        while self.waiting and self.reserved_pages + self.waiting[0].pages <= self._limits.page_budget:
            sequence = self.waiting.popleft()
            self.reserved_pages += sequence.pages
            self.running += 1
            self._prefilling.append(sequence)

    def _decoding(self) -> list[Sequence]:
        ready = self._ready
        share = -(-(self.running - len(self._prefilling)) // self._under_way)
        count = min(len(ready), self._limits.micro_batch.decode, max(share, 1))
        return [ready.popleft() for _ in range(count)]

    def _chunks(self, budget: int, sampled: list[Sequence]) -> tuple[Chunk, ...]:
        """Of the oldest prompts; those that end here are added to `sampled`."""
        chunks: list[Chunk] = []
        while self._prefilling and budget > 0 and len(chunks) < self._limits.micro_batch.prefill:
            sequence = self._prefilling[0]
            length = min(budget, sequence.request.prompt_tokens - sequence.computed)
            chunks.append(Chunk(length, sequence.computed))
            sequence.computed += length
            budget -= length
            if sequence.computed == sequence.request.prompt_tokens:
                sampled.append(self._prefilling.popleft())
        return tuple(chunks)
