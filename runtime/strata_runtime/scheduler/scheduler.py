"""The scheduler: which tokens of which sequences the next micro-batch carries, in which blocks. Called by the engine at every step.

Iteration-level continuous batching: sequences join and leave at every step. Admission asks for the blocks of a prompt that are not there
yet, best rank first; nothing is kept free for answers. A decoding sequence takes a block when it needs one, and where none is free the
one that came last gives all of its own back and is computed again later: the first in rank never does, so that every sequence ends.
Blocks whose tokens were computed before, for whomever, are shared. Decode micro-batches are cut so that as many as the plan says are under
way, one per stage as a rule; prompts are cut into chunks that fill the step up to the plan's token limit. A sequence that is suspected
of having failed a step computes its prompt in steps of its own, so that it can fail nobody else's. Where tokens are drafted by the model's own
weights at fewer bits, they are in steps that carry nothing else; a small model beside the leader drafts before the step that verifies. Either only
while no prompt is to be computed. Blocks that were kept over a change of epoch may lack some layers: these alone compute them again, in steps of
their own, before anybody goes on from them. Knows no tensors and no sockets.
"""

import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from strata_planner.contract.block_names import packed
from strata_planner.contract.frames import Segment
from strata_planner.contract.plan import NO_SPECULATION, MicroBatch
from strata_planner.contract.plan import Speculation as Wish
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
from strata_runtime.errors import RequestRefusedError
from strata_runtime.scheduler.blocks import BlockPool
from strata_runtime.scheduler.draft_round import DraftRound, DraftTask, draft_start, know, lengths
from strata_runtime.scheduler.sequence import Sequence
from strata_runtime.scheduler.speculation import Guesses, Speculation


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan allows the replica: from the leader's role. `under_way`: micro-batches, at most. `sharing`: of blocks with equal tokens.
    `state_slots`: sequences that run at once, since each keeps state of its last position alone; 0: none keeps any, and as many run as have blocks.
    """

    under_way: int
    micro_batch: MicroBatch
    page_tokens: int
    page_budget: int
    max_model_len: int
    vocabulary: int = 2**31  # rows of the model's embedding
    sharing: bool = True
    speculation: Wish = NO_SPECULATION
    drafts: bool = False  # the replica has weights of fewer bits to draft with
    state_slots: int = 0
    draft_positions: int = 0  # of the small model beside the leader, which drafts in their place; 0: there is none
    keeps_drafts: bool = (
        True  # what that model has computed of drafts that were right is what it would compute of the text
    )

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @property
    def most_tokens(self) -> int:
        """Prompt plus answer of the longest request that can ever run."""
        return min(self.max_model_len, self.page_budget * self.page_tokens)


class Batch(NamedTuple):
    """A micro-batch: `decoding` of its segments decode, which come first. `draft`: all of them, with draft weights. Or what the small model drafts first.
    `refill`: nothing is sampled, and only these layers compute.
    """

    segments: list[tuple[Sequence, Segment]]
    decoding: int = 0
    draft: bool = False
    round: DraftRound = ()
    refill: tuple[int, int] | None = None


EMPTY = Batch([])


class Scheduler:
    """Sequences wait, then run; a running one is ready unless a token of it is being sampled."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockPool(limits.page_budget)
        self.waiting: list[Sequence] = []  # by rank
        self.running: dict[int, Sequence] = {}
        self.preemptions = 0
        self.dropped: list[int] = []  # sequences that the stages are still to forget
        self._promised = 0  # blocks that prompts which run are still to take
        self._prefilling: list[Sequence] = []  # by rank
        self._apart: deque[Sequence] = deque()  # likewise, each alone
        self._was_apart = False  # the step before was one of theirs
        self.refill = (0, 0)  # first and end of the layers that blocks lack
        self._was_refill = False  # the step before was one for them
        self._has_refilled = False
        self.pace = Pace()
        self._beside = limits.draft_positions > 0
        self.speculation = Speculation(
            limits.speculation, limits.micro_batch.most_sampled, self.pace, drafts=limits.drafts or self._beside
        )
        self._ready: deque[Sequence] = deque()  # decoding, nothing in flight
        self._step = 0

    @property
    def held_blocks(self) -> int:
        return self.blocks.count - self.blocks.free

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
        self._wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence."""
        if sequence.sequence in self.running:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)

    def once_more(self, sequence: Sequence) -> None:
        """Its last position is computed again; where nobody can go back in its state, all of them."""
        if self.limits.state_slots:
            self.start_again(sequence)
        else:
            sequence.computed -= 1
            self.ready_again(sequence)

    def start_again(self, sequence: Sequence) -> None:
        """Take its blocks from a running sequence, which waits to be computed anew."""
        self._stop(sequence)
        self._wait(sequence)

    def ready_again(self, sequence: Sequence) -> None:
        """Its token has been sampled and it goes on, unless it has no blocks any more."""
        if sequence.sequence in self.running:
            self._ready.append(sequence)

    def next_batch(self, step: int) -> Batch:
        """The micro-batch of step number `step`; empty if nothing is ready."""
        self._step = step
        self._admit()
        if self.blocks.lacking and not (self._was_refill and (self._ready or self._apart or self._whole())):
            self._was_refill = True
            if refilled := self._refill_segments():
                return Batch(refilled, refill=self.refill)
        self._was_refill = False
        if self._apart and not (self._was_apart and (self._ready or self._prefilling)):  # others get their turns
            self._was_apart = True
            return Batch(self._apart_segments())
        self._was_apart = False
        picked = self._picked()
        drafting = self._drafting(picked)
        if drafting and self._beside:
            self._ready.extendleft(reversed(picked))
            return Batch([], round=self._draft_round(drafting))
        if drafting:
            self._ready.extendleft(sequence for sequence in reversed(picked) if sequence not in drafting)
            return Batch([self._advance_draft(sequence) for sequence in drafting], len(drafting), draft=True)
        decoding = [self._advance(sequence, 1) for sequence in picked]
        rows = sum(segment.length for _, segment in decoding)
        most = max(self.limits.micro_batch.most_prompts(rows), self._resumed(rows))
        prompts = self._prefill_segments(self._prompt_budget(rows, rows - len(decoding)), most)
        return Batch(decoding + prompts, len(decoding))

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda each: each.rank)

    def _stop(self, sequence: Sequence) -> None:
        """It runs no longer, and the stages will hear of it."""
        del self.running[sequence.sequence]
        for queue in (self._prefilling, self._apart, self._ready):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.opened:
            self.dropped.append(sequence.sequence)
        self._promised -= sequence.promised
        self.blocks.give_back(sequence.start_again())

    def _admit(self) -> None:
        most = self.limits.state_slots or math.inf
        while self.waiting and len(self.running) < most:
            sequence = self.waiting[0]
            if sequence.awaited:  # its newest token is not known yet
                return
            found = list(self._found(sequence))
            pages = self.limits.pages(len(sequence.tokens))
            needed = pages - sum(self.blocks.is_held(block) for block in found)
            spare = self.blocks.free - self._promised - needed
            if self.running and spare < WATERMARK * self.limits.page_budget:
                return
            self.waiting.pop(0)
            self.running[sequence.sequence] = sequence
            sequence.promised = pages
            self._promised += pages
            self._use(sequence, found)
            self._go_on(sequence)
            if sequence.is_apart:
                self._apart.append(sequence)
            else:
                insort(self._prefilling, sequence, key=lambda each: each.rank)

    def _found(self, sequence: Sequence) -> Iterator[int]:
        """Blocks that hold what the sequence would compute next; its last token is always computed, for what comes after it."""
        size = self.limits.page_tokens
        if not self.limits.sharing or not sequence.shares or sequence.is_apart or sequence.computed % size:
            return
        for place in range(sequence.computed // size, (len(sequence.tokens) - 1) // size):
            block = self.blocks.find(sequence.name(place, size))
            if block is None:
                return
            yield block

    def _use(self, sequence: Sequence, found: list[int]) -> None:
        for block in found:
            self.blocks.share(block)
        self._append(sequence, found)
        tokens = len(found) * self.limits.page_tokens
        sequence.computed += tokens
        sequence.found += tokens
        sequence.named += len(found)

    def _go_on(self, sequence: Sequence) -> None:
        """In the block that it had begun to fill before a change of epoch."""
        size, computed = self.limits.page_tokens, sequence.computed
        if not self.limits.sharing or sequence.is_apart or not self.blocks.has_begun:
            return
        own = packed(sequence.tokens[computed : computed + size][: sequence.remaining - 1])
        if found := self.blocks.go_on(sequence.parent(computed // size, size), own):
            block, tokens = found
            self._append(sequence, [block])
            sequence.computed += tokens
            sequence.found += tokens

    def _append(self, sequence: Sequence, blocks: list[int]) -> None:
        sequence.blocks.extend(blocks)
        kept = min(sequence.promised, len(blocks))
        sequence.promised -= kept
        self._promised -= kept

    def _picked(self) -> list[Sequence]:
        """The decoding sequences of a step. Each has the block that its next token lies in, or there is a free one for it."""
        decoding = len(self.running) - len(self._prefilling) - len(self._apart)
        share = -(-decoding // self.limits.under_way)
        count = min(len(self._ready), self.limits.micro_batch.decode, max(share, 1))
        picked = [self._ready.popleft() for _ in range(count)]
        while self._lacked(picked) > self.blocks.free - self._promised:
            last = max(self.running.values(), key=lambda each: each.rank)
            if last in picked:
                picked.remove(last)
            self.preemptions += 1
            self.start_again(last)
        if self._ready and not picked:  # what was picked gave its own blocks back: others have their turn now
            return self._picked()
        return picked

    def _drafting(self, picked: list[Sequence]) -> list[Sequence]:
        """Those of them whose next token is drafted first; none: it is settled what each verifies beside its own token.

        Blocks for what is guessed are those that nobody else needs.
        """
        if not self.speculation.is_on or not self.speculation.room(len(picked)):
            return []
        guesses = [self._guesses_of(sequence) for sequence in picked]
        beginning = [
            (each, self._most_drafts(sequence))
            for sequence, each in zip(picked, guesses, strict=True)
            if each.is_undecided
        ]
        may_draft = not self._prefilling and not self._apart
        self.speculation.begin(beginning, may_draft=may_draft)
        spare = self.blocks.free - self._promised - self._lacked(picked)
        drafting = []
        for sequence, own in zip(picked, guesses, strict=True):
            if self._beside and len(sequence.tokens) + own.goal > self.limits.draft_positions:
                own.end_drafting()
            more = self._further_blocks(sequence, own.goal if self._beside else len(own.next))
            if own.is_drafting and may_draft and more <= spare:
                drafting.append(sequence)
                spare -= more
            else:
                own.end_drafting()
        if not drafting:
            self._choose(picked, guesses)
        return drafting

    def _draft_round(self, drafting: list[Sequence]) -> DraftRound:
        """What the small model computes: of each what it lacks, as much as a step carries in all, and drafts where nothing is lacking then."""
        size = self.limits.page_tokens
        starts = [(sequence, draft_start(sequence, self.blocks, size)) for sequence in drafting]
        tasks = []
        for sequence, start, length in lengths(starts, self.limits.micro_batch.max_step_tokens):
            own, tokens = self._guesses_of(sequence), sequence.tokens[start : start + length]
            if start + length < len(sequence.tokens):
                own.end_drafting()
            self._append(sequence, self.blocks.take(self._lacks(sequence, sequence.computed + 1 + own.goal)))
            if tokens:
                tasks.append(
                    DraftTask(sequence.sequence, start, tokens, own.goal, tuple(sequence.blocks), sequence.sampling)
                )
        return tuple(tasks)

    def drafted(self, sequence: Sequence, task: DraftTask, tokens: list[int]) -> None:
        """The small model has run a task of this sequence, which runs."""
        know(sequence, task.end, self.blocks, self.limits.page_tokens)
        own = self._guesses_of(sequence)
        for token in tokens:
            if own.is_drafting:
                own.draft(token, ends=token in sequence.stop_tokens)
        own.end_drafting()

    def verified(self, sequence: Sequence, right: int) -> None:
        """So many guesses of a running sequence were right: they are computed, by the small model too as far as it went on from them."""
        sequence.computed += right
        if self._beside and self.limits.keeps_drafts and sequence.guesses is not None:
            more = sequence.guesses.drafted_from(right)
            know(sequence, sequence.draft_computed + more, self.blocks, self.limits.page_tokens)

    def _choose(self, picked: list[Sequence], guesses: list[Guesses]) -> None:
        """What each of them verifies beside its own token."""
        self.speculation.choose(guesses)
        spare = self.blocks.free - self._promised - self._lacked(picked)
        for sequence, own in zip(picked, guesses, strict=True):
            more = self._further_blocks(sequence, own.taken)
            if more > spare:
                own.taken, more = 0, 0
            spare -= more

    def _guesses_of(self, sequence: Sequence) -> Guesses:
        if sequence.guesses is None:
            sequence.guesses = self.speculation.guesses(sequence.tokens, shares=not sequence.salt)
        return sequence.guesses

    def _most_drafts(self, sequence: Sequence) -> int:
        """Tokens that may be verified beside its own. None where its own position lies in a block with a name, which is computed once more for a
        token that could not be drawn: others may hold that block.
        """
        has_name = sequence.named * self.limits.page_tokens > sequence.computed
        return 0 if has_name or sequence.wants_scores else sequence.max_tokens - sequence.answered - 1

    def _further_blocks(self, sequence: Sequence, drafts: int) -> int:
        """That it lacks for drafts behind its own next token."""
        end = sequence.computed + 1
        return self._lacks(sequence, end + drafts) - self._lacks(sequence, end)

    def _lacks(self, sequence: Sequence, end: int) -> int:
        """Blocks for its positions before `end`."""
        return max(0, self.limits.pages(end) - len(sequence.blocks))

    def _lacked(self, picked: list[Sequence]) -> int:
        """Blocks that their own next tokens need."""
        return sum(self._lacks(sequence, sequence.computed + 1) for sequence in picked)

    def _prompt_budget(self, rows: int, drafts: int) -> int:
        """Tokens of prompts beside so many rows that decode, drafts among them; bounded for the streams' sake if there are any, also in other steps under
        way.
        """
        planned = self.limits.micro_batch
        budget = planned.max_step_tokens - rows
        first_tokens = len(self._prefilling) + len(self._apart)
        if len(self.running) == first_tokens:
            return budget
        allowed = self.pace.tokens(max(rows, 1), first_tokens + len(self.waiting))
        decoding = len(self.running) - first_tokens
        told = rows_of_a_step(decoding, self.limits.under_way, planned.decode) + drafts
        brought = planned.prompts_per_token * told
        part = filled(len(self.running) + len(self.waiting), planned.decode)
        least = planned.least_prompt_tokens
        fewest = fewest_tokens(len(self._prefilling), self.limits.page_tokens, brought, part, least)
        return int(min(budget, max(fewest, allowed)))

    def _resumed(self, rows: int) -> int:
        """Sequences of an epoch before whose next token lacks little, as many as a step has room for beside those rows. Each costs what a row costs that decodes,
        and all their streams wait: one large step has all their tokens before the last of several small ones.
        """
        size = self.limits.page_tokens
        resumed = sum(bool(each.answered and each.found) and each.remaining <= size for each in self._whole())
        return min(resumed, self.limits.micro_batch.most_sampled - rows)

    def _apart_segments(self) -> list[tuple[Sequence, Segment]]:
        sequence = self._apart[0]
        most = self.speculation.most_rows if sequence.wants_scores else self.limits.micro_batch.max_step_tokens
        length = min(most, sequence.remaining)
        if length == sequence.remaining:
            self._apart.popleft()
        return [self._advance(sequence, length)]

    def _prefill_segments(self, budget: int, most: int) -> list[tuple[Sequence, Segment]]:
        """Chunks of prompts: the first in rank has its part, what is left goes to those that need least, of equal ones to who was sent here first.

        So after a change of epoch, where all need one token, that is who waits longest: gateways send those first.
        """
        whole = self._whole()
        if budget <= 0 or not whole:
            return []
        chosen: list[tuple[Sequence, Segment]] = []
        oldest = whole[0]
        is_alone = len(whole) == 1
        size = self.limits.page_tokens
        kept = part_of_the_oldest(oldest, budget, size)
        budget -= kept
        others = sorted(whole[1:], key=lambda each: (each.priority, each.sequence))
        for sequence in prompts_of_a_step([oldest, *others], most):
            self._use(sequence, list(self._found(sequence)))
            if self.lacks(sequence):
                continue
            is_oldest = sequence is oldest
            most_tokens = budget + kept if is_oldest else budget
            length = chunk_of(sequence, most_tokens, size, is_oldest=is_oldest, is_alone=is_alone)
            if length <= 0:
                continue
            if length == sequence.remaining:
                self._prefilling.remove(sequence)
            budget -= max(0, length - kept) if is_oldest else length
            chosen.append(self._advance(sequence, length))
        return chosen

    def lacks(self, sequence: Sequence) -> bool:
        """Whether blocks that it has found are to be computed again in part."""
        return bool(self.blocks.lacking) and not self.blocks.lacking.isdisjoint(sequence.blocks)

    def _whole(self) -> list[Sequence]:
        """Prompts that can be computed now."""
        return [each for each in self._prefilling if not self.lacks(each)] if self.blocks.lacking else self._prefilling

    def _refill_segments(self) -> list[tuple[Sequence, Segment]]:
        """Of each sequence blocks in a row that lack layers: they are whole with this step. Of those with one priority whoever has least first: nobody else comes
        to lack any, so that each waits for those before it alone, and they all wait least in sum.
        """
        size, lacking = self.limits.page_tokens, self.blocks.lacking
        left = self.limits.micro_batch.max_step_tokens // size
        chosen = []
        most = (
            self.limits.micro_batch.most_prompts(0) if self._has_refilled else 1
        )  # one goes on soon, others behind it
        lacks = [each for each in self._prefilling if self.lacks(each)]
        for sequence in sorted(lacks, key=lambda each: (each.priority, each.computed))[:most]:
            first = next((place for place, block in enumerate(sequence.blocks) if block in lacking), -1)
            run = (
                list(itertools.takewhile(lacking.__contains__, sequence.blocks[first : first + left]))
                if first >= 0
                else []
            )
            if not run:  # who came before has them in this step, or there is no room in it
                continue
            lacking.difference_update(run)
            left -= len(run)
            if sequence.first_step < 0:
                sequence.first_step = self._step
            length = min(len(run) * size, sequence.computed - first * size)
            sequence.refilled += length
            segment = Segment(sequence.sequence, first * size, length, 0, sequence.untold_blocks())
            chosen.append((sequence, segment))
        self._has_refilled = self._has_refilled or bool(chosen)
        return chosen

    def _advance(self, sequence: Sequence, length: int) -> tuple[Sequence, Segment]:
        size, start = self.limits.page_tokens, sequence.computed
        sequence.computed += length
        drafts = sequence.drafted
        self._append(sequence, self.blocks.take(self._lacks(sequence, sequence.computed + drafts)))
        if self.limits.sharing and sequence.shares:
            for place in range(sequence.named, sequence.computed // size):
                self.blocks.name(sequence.blocks[place], sequence.name(place, size))
        sequence.named = sequence.computed // size
        if sequence.first_step < 0:
            sequence.first_step = self._step
        sequence.awaited = sequence.remaining == 0
        sampled = length if sequence.wants_scores else drafts + sequence.awaited
        return sequence, Segment(sequence.sequence, start, length + drafts, sampled, sequence.untold_blocks())

    def _advance_draft(self, sequence: Sequence) -> tuple[Sequence, Segment]:
        """One token more is drafted. Nothing of it is computed for good: its positions are written over, and have no names before."""
        start = sequence.computed + len(self._guesses_of(sequence).next)
        self._append(sequence, self.blocks.take(self._lacks(sequence, start + 1)))
        sequence.awaited = True
        return sequence, Segment(sequence.sequence, start, 1, 1, sequence.untold_blocks())
