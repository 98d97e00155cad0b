"""The scheduler: which tokens of which sequences the next micro-batch carries. Called by the engine at every step.

Iteration-level continuous batching: sequences join and leave at every step. Admission reserves pages for a sequence's
longest length in the smallest slot of the replica, first come first served, so that no slot can run out: what does not
fit waits. Decode micro-batches are cut so that as many as the plan says are under way, one per stage as a rule; prompts are cut into chunks that fill the
step up to the plan's token limit. A sequence that is suspected of having failed a step computes its prompt in steps of its
own, so that it can fail nobody else's. Knows no tensors and no sockets.
"""

from collections import deque
from dataclasses import dataclass

from strata_planner.contract.frames import Segment
from strata_planner.contract.plan import MicroBatch
from strata_runtime.errors import RequestRefusedError
from strata_runtime.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan allows the replica: from the leader's role. `under_way`: micro-batches, at most."""

    under_way: int
    micro_batch: MicroBatch
    page_tokens: int
    page_budget: int
    max_model_len: int
    vocabulary: int = 2**31  # rows of the model's embedding

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @property
    def most_tokens(self) -> int:
        """Prompt plus answer of the longest request that can ever run."""
        return min(self.max_model_len, self.page_budget * self.page_tokens)


class Scheduler:
    """Sequences wait, then run; a running one is ready unless a token of it is being sampled."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.reserved_pages = 0
        self._prefilling: deque[Sequence] = deque()
        self._suspects: deque[Sequence] = deque()  # likewise, each alone
        self._was_suspect = False  # the step before was one of theirs
        self._ready: deque[Sequence] = deque()  # decoding, nothing in flight

    def add(self, sequence: Sequence) -> None:
        """Raises RequestRefusedError for a sequence that could not run even alone."""
        highest, lowest = max(sequence.tokens, default=-1), min(sequence.tokens, default=-1)
        if lowest < 0 or highest >= self.limits.vocabulary or sequence.max_tokens <= sequence.answered:
            raise RequestRefusedError(
                f"{len(sequence.tokens)} tokens from {lowest} to {highest} with max_tokens {sequence.max_tokens}: a "
                f"request has tokens, all from 0 to {self.limits.vocabulary - 1}, and at least one more to come; use "
                "this model's own tokenizer"
            )
        most = self.limits.most_tokens
        if sequence.longest > most:
            raise RequestRefusedError(
                f"{sequence.prompt_length} prompt tokens + max_tokens {sequence.max_tokens} = {sequence.longest} exceed the "
                f"{most} tokens that one request may take here; shorten the prompt or lower max_tokens"
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a finished or aborted sequence; True if the stages may hold KV of it."""
        if self.running.pop(sequence.sequence, None) is None:
            self.waiting.remove(sequence)
            return False
        self.reserved_pages -= self.limits.pages(sequence.longest)
        for queue in (self._prefilling, self._suspects, self._ready):
            if sequence in queue:
                queue.remove(sequence)
        return sequence.opened

    def ready_again(self, sequence: Sequence) -> None:
        """Its token has been sampled and it goes on."""
        self._ready.append(sequence)

    def next_segments(self) -> list[tuple[Sequence, Segment]]:
        """The next micro-batch, decode first; empty if nothing is ready."""
        self._admit()
        if self._suspects and not (self._was_suspect and (self._ready or self._prefilling)):  # others get their turns
            self._was_suspect = True
            return self._prefill_segments(self._suspects, self.limits.micro_batch.max_step_tokens, 1)
        self._was_suspect = False
        chosen = self._decode_segments()
        budget = self.limits.micro_batch.max_step_tokens - len(chosen)
        chosen.extend(self._prefill_segments(self._prefilling, budget, self.limits.micro_batch.prefill))
        return chosen

    def _admit(self) -> None:
        while self.waiting:
            pages = self.limits.pages(self.waiting[0].longest)
            if self.reserved_pages + pages > self.limits.page_budget:
                return
            sequence = self.waiting.popleft()
            self.reserved_pages += pages
            self.running[sequence.sequence] = sequence
            (self._suspects if sequence.alone else self._prefilling).append(sequence)

    def _decode_segments(self) -> list[tuple[Sequence, Segment]]:
        decoding = len(self.running) - len(self._prefilling) - len(self._suspects)
        share = -(-decoding // self.limits.under_way)
        count = min(len(self._ready), self.limits.micro_batch.decode, max(share, 1))
        return [self._advance(self._ready.popleft(), 1) for _ in range(count)]

    def _prefill_segments(self, queue: deque[Sequence], budget: int, most: int) -> list[tuple[Sequence, Segment]]:
        chosen: list[tuple[Sequence, Segment]] = []
        while queue and budget > 0 and len(chosen) < most:
            sequence = queue[0]
            length = min(budget, len(sequence.tokens) - sequence.computed)
            if sequence.computed + length == len(sequence.tokens):
                queue.popleft()
            budget -= length
            chosen.append(self._advance(sequence, length))
        return chosen

    @staticmethod
    def _advance(sequence: Sequence, length: int) -> tuple[Sequence, Segment]:
        start = sequence.computed
        sequence.computed += length
        sampled = sequence.computed == len(sequence.tokens)
        return sequence, Segment(sequence.sequence, start, length, int(sampled))
