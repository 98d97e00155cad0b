"""The engine of a replica: requests in, steps out, sampled tokens in, token events out.

The leader's worker calls it in this order: `submit` / `abort` for what gateways ask, `next_step` while the pipeline has
room, `take` for every result that comes back. It is a function of those calls alone, and of what a small model drafts where there is one: no clock,
no sockets, no tensors.
"""

import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from strata_planner.contract.frames import (
    NEVER,
    NOT_YET,
    Free,
    HeldBlock,
    KvOperation,
    SampledToken,
    Segment,
    StepResult,
    Submit,
    TokenEvent,
)
from strata_runtime.errors import RequestRefusedError, StepError
from strata_runtime.scheduler.draft_round import Draft, DraftRound
from strata_runtime.scheduler.scheduler import EMPTY, Limits, Scheduler
from strata_runtime.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """What the stages do next: operations first, then the segments with the token ids stage 0 embeds (packed). `draft`: with draft weights."""

    step: int
    segments: list[Segment]
    operations: list[KvOperation]
    token_ids: list[int]
    draft: bool = False
    refill: tuple[int, int] | None = None  # first and end of the layers that compute; None: all, and tokens are sampled


class _Asked(NamedTuple):
    """Of a step under way: rows that decode, tokens of prompts, and (sequence, position) of each token that is to come back."""

    step: int
    rows: int
    prompt_tokens: int
    tokens: tuple[tuple[int, int], ...]
    draft: bool
    refill: bool
    sequences: tuple[int, ...]


class Engine:
    """Continuous batching for one replica."""

    def __init__(self, limits: Limits, draft: Draft | None = None) -> None:
        """`draft`: where `limits.draft_positions` tells of a small model; called by `next_step`."""
        self.scheduler = Scheduler(limits)
        self._draft = draft
        self._under_way: deque[_Asked] = deque()  # steps whose result has not come back
        self._sequences: dict[str, Sequence] = {}
        self._by_number: dict[int, Sequence] = {}
        self._next_sequence = 0
        self._next_step = 0
        self._weights: str | None = None  # that the last step which came back has run with

    @property
    def in_flight(self) -> int:
        """Steps whose result has not come back."""
        return len(self._under_way)

    @property
    def oldest(self) -> int | None:
        """The number of the oldest of them, None without any. May be read from any thread."""
        with suppress(IndexError):  # its result has just come
            return self._under_way[0].step
        return None

    def requests_under_way(self, *, newest: bool) -> list[str]:
        """Those in the newest step whose result has not come back, else in the oldest. May be read from any thread, in the midst of a step too."""
        with suppress(IndexError):
            return self.requests_of(self._under_way[-1 if newest else 0].sequences)
        return []

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the replica's blocks that sequences hold."""
        return self.scheduler.held_blocks / max(self.scheduler.limits.page_budget, 1)

    def submit(self, submit: Submit) -> None:
        """Queue a request; one that is already known is not run twice. Raises RequestRefusedError."""
        if submit.request in self._sequences:
            return
        if (problem := submit.sampling.problem(self.scheduler.limits.vocabulary)) is not None:
            raise RequestRefusedError(f"tokens cannot be drawn so: {problem}")
        if math.isnan(submit.deadline):
            raise RequestRefusedError("deadline is not a number: send seconds since 1970")
        sequence = Sequence.of(submit, self._next_sequence)
        self.scheduler.add(sequence)
        self._next_sequence += 1
        self._sequences[submit.request] = sequence
        self._by_number[sequence.sequence] = sequence

    def abort(self, request: str) -> None:
        """Forget a request, wherever it is; unknown ones are no error (it may have just finished)."""
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._forget(sequence)

    def next_step(self) -> Step | None:
        """The next micro-batch if the pipeline has room, or KV operations alone, or None."""
        scheduler, has_room = self.scheduler, self.in_flight < self.scheduler.limits.under_way
        batch = scheduler.next_batch(self._next_step) if has_room else EMPTY
        while batch.round:
            self._draft_round(batch.round)
            batch = scheduler.next_batch(self._next_step)
        if not batch.segments and not scheduler.dropped:
            return None
        operations: list[KvOperation] = [Free(number) for number in scheduler.dropped]
        scheduler.dropped.clear()
        token_ids: list[int] = []
        for sequence, segment in batch.segments:
            if not sequence.opened:
                sequence.opened = True
                operations.append(sequence.open())
            token_ids.extend(sequence.inputs(segment))
        segments = [segment for _, segment in batch.segments]
        step = Step(self._next_step, segments, operations, token_ids, batch.draft, batch.refill)
        self._next_step += 1
        if batch.segments:
            rows = sum(segment.length for _, segment in batch.segments[: batch.decoding])
            wanted = tuple((segment.sequence, position) for segment in step.segments for position in segment.sampled)
            is_refill = batch.refill is not None
            sequences = tuple(segment.sequence for segment in segments)
            prompts = len(token_ids) - rows
            self._under_way.append(_Asked(step.step, rows, prompts, wanted, batch.draft, is_refill, sequences))
        return step

    def take(self, result: StepResult) -> list[TokenEvent]:
        """A result of the last stage: the tokens to deliver. Raises StepError for one that was not asked for."""
        if not self.in_flight:
            raise StepError(f"a result for step {result.step} came while no step was in flight")
        asked = self._under_way.popleft()
        got = (result.step, tuple((each.sequence, each.position) for each in result.tokens))
        if got != (asked.step, asked.tokens):
            raise StepError(
                f"the result of step {result.step} has {len(result.tokens)} tokens {got[1][:4]}...; step {asked.step} was to be answered "
                f"with {len(asked.tokens)} tokens {asked.tokens[:4]}... (sequence, position)"
            )
        pace = self.scheduler.speculation.draft_pace if asked.draft else self.scheduler.pace
        if not asked.refill:
            pace.learn(asked.rows, asked.prompt_tokens, result.seconds)
        if result.weights != self._weights:
            if self._weights is not None:
                self._weights_changed(result.step)
            self._weights = result.weights
        events: list[TokenEvent] = []
        for number, group in groupby(result.tokens, lambda each: each.sequence):
            sequence = self._by_number.get(number)
            if sequence is None:  # aborted while its token was on the way
                continue
            if asked.draft:
                self._take_draft(sequence, next(group).token)
            else:
                events.extend(self._take(sequence, list(group)))
        return events

    def inherit(self, blocks: Iterable[HeldBlock], refill: tuple[int, int], weights: str) -> None:
        """Before the first step: what blocks hold, computed with these `weights`, but for layers `refill[0]` to before `refill[1]`."""
        assert not self._next_step, "blocks are in use already"
        self.scheduler.blocks.inherit(blocks, lacking=refill[0] < refill[1])
        self.scheduler.refill = refill
        self._weights = weights

    def requests_of(self, sequences: Iterable[int]) -> list[str]:
        """The requests behind sequence numbers; those that are forgotten are left out."""
        return [self._by_number[number].request for number in sequences if number in self._by_number]

    def _take(self, sequence: Sequence, sampled: list[SampledToken]) -> list[TokenEvent]:
        """Of one sequence, at the positions of its segment: its next token, and those that drafts have brought nearer."""
        if sequence.wants_scores and not (sampled := sequence.take_scores(sampled)):
            return []
        sequence.awaited = False
        is_unwanted, sequence.unwanted = sequence.unwanted or sampled[0].token == NOT_YET, False
        if sequence.guesses is not None:
            drawn = [each.token for each in sampled]
            sampled = sampled[: self.scheduler.speculation.accepted(sequence.guesses, drawn)]
        if sequence.sequence in self.scheduler.running:
            self.scheduler.verified(sequence, len(sampled) - 1)
        if sequence.guesses is not None:
            sequence.guesses.seen([] if is_unwanted else [token for token in drawn[: len(sampled)] if token != NEVER])
        if is_unwanted:
            self._once_more(sequence)
            return []
        events = []
        for each in sampled:
            if each.token == NEVER:
                events.append(TokenEvent(sequence.request, sequence.answered, 0, 0.0, [], "never"))
                self._forget(sequence)
                return events
            index, found, scores = sequence.take(each), sequence.found, sequence.told_scores()
            known = (each.logprob, each.top, sequence.finish, found, scores, sequence.refilled)
            events.append(TokenEvent(sequence.request, index, each.token, *known))
            if sequence.finish:
                self.scheduler.speculation.ended(sequence.guesses, sequence.tokens[sequence.prompt_length :])
                self._forget(sequence)
                return events
        self.scheduler.ready_again(sequence)
        return events

    def _take_draft(self, sequence: Sequence, token: int) -> None:
        """Of a step with draft weights: a guess and no more, also for whom gave its blocks back meanwhile."""
        sequence.awaited = sequence.unwanted = False
        assert sequence.guesses is not None
        sequence.guesses.draft(token, ends=token in sequence.stop_tokens)
        self.scheduler.ready_again(sequence)

    def _draft_round(self, tasks: DraftRound) -> None:
        assert self._draft is not None
        drafted, seconds = self._draft(tasks)
        for task, tokens in zip(tasks, drafted, strict=True):
            self.scheduler.drafted(self._by_number[task.sequence], task, tokens)
        counts, limits = {task.count for task in tasks}, self.scheduler.limits
        # That is computed first where it has kept up: the last token, and a draft before it that was right, or all of them.
        next_tokens = 2 if limits.keeps_drafts else 1 + limits.speculation.tokens
        if len(counts) == 1 and all(len(task.tokens) <= next_tokens for task in tasks) and (count := counts.pop()):
            self.scheduler.speculation.draft_pace.learn(len(tasks), 0, seconds / count)

    def _once_more(self, sequence: Sequence) -> None:
        """For a token that could not be drawn yet, unless it has no blocks any more."""
        if sequence.sequence in self.scheduler.running:
            self.scheduler.once_more(sequence)

    def _weights_changed(self, step: int) -> None:
        """From this step on the stages compute with others: nothing from before is shared with what is computed since.

        Sequences that run go on from the KV they have, as they would alone. Who began with this step or later and found blocks from
        before has been given what it never would have computed: it starts again, before any token of it is known.
        """
        lacking = [each for each in self.scheduler.running.values() if self.scheduler.lacks(each)]
        self.scheduler.blocks.forget_names()
        for (
            sequence
        ) in self.scheduler.waiting:  # computed again anyway: what its token follows from is not known any more
            sequence.unwanted = sequence.awaited
        for sequence in list(self.scheduler.running.values()):
            if sequence in lacking or (sequence.found and not 0 <= sequence.first_step < step):
                sequence.unwanted = sequence.awaited
                self.scheduler.start_again(sequence)
            elif sequence.computed:
                sequence.shares = False

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request]
        del self._by_number[sequence.sequence]
        self.scheduler.remove(sequence)
