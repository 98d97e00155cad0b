"""A pipeline in memory for the engine's laws: it keeps in every block what was computed there, and samples from what it reads.

What a token leaves in its position is a digest of all tokens up to it, as read from the blocks of its sequence's table. A token is
sampled from that digest: a block that is shared, freed or written at the wrong time changes the text. Results come back in order.

Draft weights leave another digest, and draw what the others would most of the time: what is taken from their keys and values, or left of
them in a block that somebody reads, changes the text. A small model beside the leader has blocks of its own under the same numbers: whatever it
goes on from must be what it computed of that very text.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from typing import Any

from msgspec import structs

from strata_planner.contract.block_names import NO_SALT, packed
from strata_planner.contract.frames import (
    NEVER,
    NOT_YET,
    Free,
    Grammar,
    HeldBlock,
    LogitRules,
    Open,
    PromptScore,
    SampledToken,
    Sampling,
    Segment,
    StepResult,
    Submit,
    TokenEvent,
)
from strata_runtime.scheduler.draft_round import Drafted, DraftRound, DraftTask
from strata_runtime.scheduler.engine import Engine, Step
from strata_runtime.scheduler.scheduler import Limits
from strata_runtime.stage.contents import Content, Contents, in_common, told

STOP = 7
WORDS = (100, 101, 102)  # that texts are made of: few, so that what was guessed is right at times


def digest(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(8, "little"), digest_size=8).digest()


def sampled(state: bytes) -> int:
    number = int.from_bytes(state, "little")
    return STOP if number % 16 == 0 else WORDS[number % len(WORDS)]


def drafted(likely: bytes) -> int:
    """What draft weights draw: right three times in four."""
    number = int.from_bytes(likely, "little")
    return WORDS[(number // 4 + 1) % len(WORDS)] if number % 4 == 0 else sampled(likely)


def wrong(likely: bytes) -> int:
    """Never what the weights draw."""
    return WORDS[(WORDS.index(right) + 1) % len(WORDS)] if (right := sampled(likely)) in WORDS else WORDS[0]


def score_of(state: bytes) -> float:
    return float(int.from_bytes(state, "little") % 1000)


def scores_of(submit: Submit) -> list[PromptScore]:
    """Of the prompt's tokens from the second on."""
    state, scores = b"", []
    for token in submit.prompt:
        scores.append(PromptScore(token, score_of(state), 0, []))
        state = digest(state, token)
    return scores[1:]


def text_of(submit: Submit) -> list[int]:
    """The answer as it is when nothing else runs, delivered tokens included; up to where a grammar allows nothing."""
    state = b""
    for token in submit.prompt:
        state = digest(state, token)
    answer: list[int] = []
    while len(answer) < submit.max_tokens and (not answer or answer[-1] not in submit.stop_tokens):
        if len(answer) == allowed(submit.sampling):
            break
        answer.append(submit.delivered[len(answer)] if len(answer) < len(submit.delivered) else sampled(state))
        state = digest(state, answer[-1])
    return answer


def grammar(steps: int, allowed: int) -> Sampling:
    """Drawn by a grammar that takes so many steps to compile, and allows nothing behind so many tokens."""
    return Sampling(temperature=0, rules=LogitRules(grammar=Grammar("regex", f"{steps} {allowed}", (STOP,))))


def allowed(sampling: Sampling) -> int:
    """Tokens of an answer, at most."""
    return int(sampling.rules.grammar.text.split()[1]) if sampling.rules and sampling.rules.grammar else 10_000


def submit(name: str, prompt: Sequence[int], answer: int, *, delivered: int = 0, **fields: Any) -> Submit:
    """`delivered`: of the answer's tokens; as many of them as leave one to come."""
    fields = {"stop_tokens": [STOP], "sampling": Sampling(temperature=0)} | fields
    asked = Submit(name, list(prompt), [], answer, **fields)
    return structs.replace(asked, delivered=text_of(asked)[:-1][:delivered])


@dataclass(frozen=True)
class Entry:
    """What one position of a block holds: the digest of all tokens up to it, the weights that computed these, and the digest of the tokens alone.

    `is_whole`: every layer has it; else some lost it in a takeover, and nobody may read it.
    """

    state: bytes = b""
    weights: frozenset[int] = frozenset()
    likely: bytes = b""
    is_whole: bool = True


@dataclass
class SmallModel:
    """Drafts from what lies in its own blocks. `draw`: from the digest of a text; `sampled` would always be right."""

    draw: Callable[[bytes], int] = drafted
    seconds: float = 0.001  # of a token of each sequence
    engine: Engine | None = None
    blocks: dict[tuple[int, int], bytes] = field(default_factory=dict)
    tasks: list[DraftRound] = field(default_factory=list)  # of each round
    computed: int = 0  # tokens in all
    keeps_drafts: bool = True  # else what it leaves of drafts is nothing that anybody may go on from

    @property
    def rounds(self) -> int:
        return len(self.tasks)

    def draft(self, tasks: DraftRound) -> Drafted:
        assert self.engine is not None
        limits = self.engine.scheduler.limits
        self.tasks.append(tasks)
        self.computed += sum(len(task.tokens) + max(task.count - 1, 0) for task in tasks)
        assert tasks
        assert sum(len(task.tokens) for task in tasks) <= limits.micro_batch.max_step_tokens
        assert all(task.end + task.count <= limits.draft_positions for task in tasks if task.count)
        return Drafted([self._run(task) for task in tasks], self.seconds * max(task.count for task in tasks))

    def _run(self, task: DraftTask) -> list[int]:
        assert self.engine is not None
        size = self.engine.scheduler.limits.page_tokens
        text = self.engine._by_number[task.sequence].tokens
        assert text[task.start : task.end] == task.tokens
        state = self.blocks[task.blocks[(task.start - 1) // size], (task.start - 1) % size] if task.start else b""
        assert state == reduce(digest, text[: task.start], b""), "it goes on from another text"
        guesses: list[int] = []
        for position in range(task.start, task.end + max(task.count - 1, 0)):
            if position >= task.end:
                guesses.append(self.draw(state))
            state = digest(state, text[position] if position < task.end else guesses[-1])
            kept = self.keeps_drafts or position < task.end
            self.blocks[task.blocks[position // size], position % size] = state if kept else b"drafted"
        return [*guesses, self.draw(state)] if task.count else []


class Noting:
    """What one stage notes of its blocks, as `stage.holdings` does."""

    def __init__(self, page_tokens: int) -> None:
        self.contents = Contents(page_tokens)
        self.weights: int | None = None
        self._tables: dict[int, list[int]] = {}
        self._roots: dict[int, bytes] = {}

    def note(self, step: Step, weights: int) -> None:
        for operation in step.operations:
            if isinstance(operation, Open):
                self._roots[operation.sequence] = operation.root or NO_SALT
            else:
                self.contents.give_back(self._tables.pop(operation.sequence, []))
        if step.segments and weights != self.weights:
            self.contents.begin({})
            self.weights = weights
        ids = iter(step.token_ids)
        for segment in step.segments:
            table = self._tables.setdefault(segment.sequence, [])
            table.extend(segment.blocks)
            tokens = packed([next(ids) for _ in range(segment.length)])
            if step.draft:
                self.contents.spoil(table, segment.start)
            else:
                self.contents.write(table, self._roots[segment.sequence], segment.start, tokens)

    def left(self) -> dict[int, Content]:
        return self.contents.left(self._tables.values())


@dataclass
class Pipeline:
    """Checks every step as the stages would. `weights`: their number, from the next step that is accepted."""

    engine: Engine
    weights: int = 0
    in_flight: deque[StepResult] = field(default_factory=deque)
    under_way: deque[set[tuple[int, int]]] = field(default_factory=deque)  # places that those steps wrote
    refilled: int = 0  # tokens
    tables: dict[int, list[int]] = field(default_factory=dict)
    blocks: dict[tuple[int, int], Entry] = field(default_factory=dict)
    steps: int = 0
    first_weights: dict[int, int] = field(default_factory=dict)  # of each sequence, when it was opened
    # (sequence, step) of tokens from KV of weights before the sequence's first.
    mixed: set[tuple[int, int]] = field(default_factory=set)
    ends: dict[int, int] = field(default_factory=dict)  # of each sequence, the largest that a segment had
    opened: dict[int, Open] = field(default_factory=dict)
    # Of each open sequence with a grammar: steps until it is compiled.
    waited: dict[int, int] = field(default_factory=dict)
    tokens_run: int = 0
    draft_steps: int = 0
    fixed_seconds: float = 0.01  # of a step
    draft_seconds: float = 0.003  # of one with draft weights
    row_seconds: float = 0.001
    drafter: "SmallModel | None" = None
    # With their weights, that the last stage has not computed.
    noted: deque[tuple[Step, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        size = self.engine.scheduler.limits.page_tokens
        self.stages = (Noting(size), Noting(size))

    @classmethod
    def beside(cls, limits: Limits, small: SmallModel, **fields: Any) -> "Pipeline":
        """Of an engine with a small model that drafts."""
        small.engine = Engine(limits, small.draft)
        return cls(small.engine, drafter=small, **fields)

    @classmethod
    def after(cls, before: "Pipeline", limits: Limits, *, refill: tuple[int, int], small: SmallModel) -> "Pipeline":
        """The same blocks after a loss, whoever led: a step that was under way has left anything in them, and of others layers `refill` is lost what they held."""
        made = cls.beside(limits, small, weights=before.weights)
        made.blocks = {
            place: dataclasses.replace(entry, is_whole=entry.is_whole and refill[0] == refill[1])
            for place, entry in before.blocks.items()
        }
        for step in before.under_way:
            for place in step:
                made.blocks[place] = Entry(b"half computed", is_whole=False)
        if {stage.weights for stage in before.stages} <= {
            None,
            before.weights,
        }:  # else they hold what others have computed
            made.engine.inherit(before.kept(), refill, str(before.weights))
            for stage, old in zip(made.stages[: 1 if refill[0] < refill[1] else 2], before.stages, strict=False):
                left = old.left()
                stage.contents.begin({block: left[block] for block in left if block < limits.page_budget})
                stage.weights = before.weights
        return made

    def kept(self) -> list[HeldBlock]:
        """What the first stage and the last, which is some steps behind it, both know to be in their blocks."""
        return in_common(told(self.stages[0].left()), self.stages[1].left())

    def accept(self, step: Step) -> None:
        assert step.step == self.steps
        self.stages[0].note(step, self.weights)
        self.noted.append((step, self.weights))
        self.steps += 1
        limits = self.engine.scheduler.limits
        for operation in step.operations:
            if isinstance(operation, Open):
                assert operation.sequence not in self.tables, "opened twice"
                self.tables[operation.sequence] = []
                self.ends[operation.sequence] = 0
                self.first_weights[operation.sequence] = self.weights
                self._open(operation)
            if isinstance(operation, Free):
                self._free(operation)
        self._check_states(step)
        ids = iter(step.token_ids)
        results: list[SampledToken] = []
        written: set[tuple[int, int]] = set()
        for segment in step.segments:
            table = self._table(segment, step)
            for position in range(segment.start, segment.start + segment.length):
                place = self._place(table, position)
                assert place not in written, "two tokens of one step at one place"
                written.add(place)
                self._write(place, self._read(table, position - 1), next(ids), step)
            results += self._sampled(segment, table, step)
        assert next(ids, None) is None
        assert len(step.token_ids) <= limits.micro_batch.max_step_tokens
        self.tokens_run += len(step.token_ids)
        self.draft_steps += step.draft
        if step.draft:
            assert all((segment.length, segment.sample) == (1, 1) for segment in step.segments)
        if step.refill is not None:
            assert step.refill == self.engine.scheduler.refill
            assert not results
        if step.segments:
            self.under_way.append(written)
            fixed = self.draft_seconds if step.draft else self.fixed_seconds
            seconds = fixed + self.row_seconds * len(step.token_ids)
            self.in_flight.append(StepResult(0, 1, step.step, results, str(self.weights), seconds))
            assert len(self.in_flight) <= limits.under_way

    def _table(self, segment: Segment, step: Step) -> list[int]:
        """Of its sequence, with what the segment appends."""
        limits, table = self.engine.scheduler.limits, self.tables[segment.sequence]
        table.extend(segment.blocks)
        end = self.ends[segment.sequence] = max(self.ends[segment.sequence], segment.start + segment.length)
        longest = limits.pages(end + limits.speculation.tokens * (limits.draft_positions > 0))
        assert limits.pages(end) <= len(table), "a table reaches the end of its sequence"
        assert len(table) <= longest or step.refill is not None, "a table is as long as its sequence, drafts included"
        return table

    def _write(self, place: tuple[int, int], before: Entry, token: int, step: Step) -> None:
        assert before.is_whole, "it goes on from what some layers lack"
        if step.refill is None:
            state = digest(b"draft" * step.draft + before.state, token)
            self.blocks[place] = Entry(state, before.weights | {self.weights}, digest(before.likely, token))
            return
        held = self.blocks[place]
        assert held.state == digest(before.state, token), "what is filled again holds another text"
        self.blocks[place] = dataclasses.replace(held, is_whole=True)
        self.refilled += 1

    def _sampled(self, segment: Segment, table: list[int], step: Step) -> list[SampledToken]:
        results = []
        for position in range(segment.start + segment.length - segment.sample, segment.start + segment.length):
            last = self._read(table, position)
            own = self._own(segment.sequence, position)
            token = self._drawn(segment, position, last, draft=step.draft) if own is None else own
            score = 0.0 if own is None else score_of(last.state)
            results.append(SampledToken(segment.sequence, position, token, score, []))
            if min(last.weights) < self.first_weights[segment.sequence]:
                self.mixed.add((segment.sequence, step.step))
        return results

    def _note_one_more(self) -> None:
        """The last stage comes to the next step that computes anything, and to those before it."""
        step = None
        while step is None or not step.segments:
            step, weights = self.noted.popleft()
            self.stages[1].note(step, weights)

    def result(self) -> list[TokenEvent]:
        result = self.in_flight.popleft()
        self.under_way.popleft()
        self._note_one_more()
        mixed = set(
            self.engine.requests_of(
                each.sequence for each in result.tokens if (each.sequence, result.step) in self.mixed
            )
        )
        events = self.engine.take(result)
        assert not mixed & {event.request for event in events}, "KV of other weights was used"
        return events

    def step(self) -> bool:
        """The engine's next step, if it has one."""
        step = self.engine.next_step()
        if step is not None:
            self.accept(step)
        return step is not None

    def drain_watching(self, watched: Callable[[], bool]) -> tuple[list[TokenEvent], bool]:
        """All that comes, and whether what is watched was ever so behind a step."""
        events: list[TokenEvent] = []
        was = False
        while self.engine.running or self.engine.waiting:
            while self.step():
                was |= watched()
            events.extend(self.result())
        return events, was

    def drain(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for _ in range(10_000):
            while self.step():
                pass
            if not self.in_flight:
                return events
            events.extend(self.result())
        raise AssertionError("the engine does not come to an end")

    def integrity(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.blocks.integrity(each.blocks for each in scheduler.running.values())

    def _open(self, operation: Open) -> None:
        """What is drawn by rules follows from the tokens so far: they come with the sequence, whenever it starts again."""
        self.opened[operation.sequence] = operation
        if (rules := operation.sampling.rules) is None:
            assert not operation.tokens or operation.sampling.prompt_logprobs >= 0
            return
        assert rules.grammar is not None
        assert list(operation.tokens) == self.engine._by_number[operation.sequence].tokens
        self.waited.setdefault(operation.sequence, int(rules.grammar.text.split()[0]))

    def _free(self, operation: Free) -> None:
        del self.tables[operation.sequence]
        if not self.engine.scheduler.limits.state_slots:  # else it starts again, and its grammar goes on being compiled
            self.waited.pop(operation.sequence, None)

    def _check_states(self, step: Step) -> None:
        """As stages do where sequences keep state."""
        if most := self.engine.scheduler.limits.state_slots:
            assert len(self.tables) <= most, "more sequences than states"
            assert all(each.start == self.ends[each.sequence] for each in step.segments), "its state is somewhere else"

    def _own(self, sequence: int, position: int) -> int | None:
        """The prompt's token, where it is to be scored."""
        opened = self.opened[sequence]
        wants = opened.sampling.prompt_logprobs >= 0 and position + 1 < opened.prompt_length
        return opened.tokens[position + 1] if wants else None

    def _drawn(self, segment: Segment, position: int, last: Entry, *, draft: bool) -> int:
        opened = self.opened[segment.sequence]
        if self.waited.get(segment.sequence, 0):
            self.waited[segment.sequence] -= position == segment.sampled[-1]
            return NOT_YET
        is_over = opened.sampling.rules and position + 1 - opened.prompt_length >= allowed(opened.sampling)
        if is_over:
            return NEVER
        return drafted(last.likely) if draft else sampled(last.state)

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        size = self.engine.scheduler.limits.page_tokens
        return table[position // size], position % size

    def _read(self, table: list[int], position: int) -> Entry:
        return Entry() if position < 0 else self.blocks[self._place(table, position)]
