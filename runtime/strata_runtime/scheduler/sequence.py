"""A sequence: one request as the leader runs it. Used by the scheduler; knows no batches."""

import math
from dataclasses import dataclass, field

from strata_planner.contract.block_names import name_of, packed, root_of
from strata_planner.contract.frames import FinishReason, Open, PromptScore, SampledToken, Sampling, Segment, Submit
from strata_runtime.scheduler.speculation import Guesses


@dataclass(slots=True, eq=False)
class Sequence:
    """The truth of a sequence is its tokens: prompt, what was delivered before, what was sampled since.

    All the rest can be computed again from them: a sequence that gave its blocks back starts at position 0.
    """

    sequence: int  # in the order of arrival
    request: str
    tokens: list[int]
    prompt_length: int
    max_tokens: int
    stop_tokens: frozenset[int]
    sampling: Sampling
    alone: bool = False  # until its first token no other sequence is in its steps
    priority: int = 0  # those with lower numbers go first
    salt: str = ""  # blocks are shared among equal ones
    deadline: float = math.inf
    computed: int = 0  # positions whose KV exists or is on its way through the stages
    blocks: list[int] = field(default_factory=list)  # of its positions, `page_tokens` each
    told: int = 0  # of the blocks: those that the stages know
    promised: int = 0  # blocks that its prompt is still to take
    found: int = 0  # of its computed positions: those that were found in blocks of others
    refilled: int = 0  # of these, those whose lost layers were computed again for it
    first_step: int = -1  # its first step since it was admitted; -1: none yet
    shares: bool = True  # its blocks hold what anybody would compute from the same tokens
    opened: bool = False  # the stages know it
    awaited: bool = False  # a token of it is being sampled
    unwanted: bool = False  # that token follows from KV that nobody should have used: it is dropped
    finish: FinishReason | None = field(default=None)
    named: int = 0  # of the blocks, from the first on: those that have names, or had no need of them
    # Of the prompt's tokens, by position: computed again, it is told again.
    scores: dict[int, PromptScore] = field(default_factory=dict)
    guesses: Guesses | None = None  # what may come next; None: nothing is drafted
    draft_computed: int = 0  # positions whose KV the model that drafts has
    _names: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, submit: Submit, sequence: int) -> "Sequence":
        return cls(
            sequence=sequence,
            request=submit.request,
            tokens=[*submit.prompt, *submit.delivered],
            prompt_length=len(submit.prompt),
            max_tokens=submit.max_tokens,
            stop_tokens=frozenset(submit.stop_tokens),
            sampling=submit.sampling,
            alone=submit.alone,
            priority=submit.priority,
            salt=submit.salt,
            deadline=submit.deadline,
        )

    @property
    def wants_scores(self) -> bool:
        """Of its prompt's tokens, before anything of its answer is known."""
        return self.sampling.prompt_logprobs >= 0 and not self.answered

    @property
    def is_apart(self) -> bool:
        """Its prompt is computed in steps of its own: it may fail them, or wants as many rows of logits as they have."""
        return self.alone or self.wants_scores

    @property
    def rank(self) -> tuple[int, float, int]:
        """The lowest goes first."""
        return self.priority, self.deadline, self.sequence

    @property
    def longest(self) -> int:
        """Positions the sequence may come to hold."""
        return self.prompt_length + self.max_tokens

    @property
    def answered(self) -> int:
        """Tokens of the answer so far, delivered ones included."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def drafted(self) -> int:
        """Guessed tokens that the step under way verifies."""
        return 0 if self.guesses is None else self.guesses.taken

    def inputs(self, segment: Segment) -> list[int]:
        """The token ids of a segment: the sequence's own, behind them what is guessed to follow."""
        own = self.tokens[segment.start : segment.start + segment.length]
        missing = segment.length - len(own)
        if not missing or self.guesses is None:
            return own
        first = segment.start + len(own) - len(self.tokens)
        return own + self.guesses.next[first : first + missing]

    def open(self) -> Open:
        """What the stages are told of it; its tokens where what is drawn depends on them."""
        told = (tuple(self.tokens), self.prompt_length) if self.sampling.rules or self.wants_scores else ((), 0)
        return Open(self.sequence, self.sampling, *told, root=root_of(self.salt) if self.salt else b"")

    def name(self, place: int, page_tokens: int) -> bytes:
        """Of the block in this place of its table, which its tokens must fill."""
        names = self._names
        while len(names) <= place:
            start = len(names) * page_tokens
            names.append(
                name_of(self.parent(len(names), page_tokens), packed(self.tokens[start : start + page_tokens]))
            )
        return names[place]

    def parent(self, place: int, page_tokens: int) -> bytes:
        """What stands before the block in this place."""
        return self.name(place - 1, page_tokens) if place else root_of(self.salt)

    def untold_blocks(self) -> tuple[int, ...]:
        """Those that the stages do not know yet; now they do."""
        told, self.told = self.told, len(self.blocks)
        return tuple(self.blocks[told:])

    def start_again(self) -> list[int]:
        """Nothing of it is computed any more. Returns the blocks that it held."""
        held, self.blocks = self.blocks, []
        self.computed = self.told = self.promised = self.named = self.draft_computed = 0
        self.found = self.refilled = 0
        self.first_step = -1
        self.shares, self.opened = True, False
        return held

    def take_scores(self, sampled: list[SampledToken]) -> list[SampledToken]:
        """Keep those of the prompt's own tokens; what is left was drawn behind it."""
        for each in sampled:
            if each.position + 1 < self.prompt_length:
                self.scores[each.position + 1] = PromptScore(each.token, each.logprob, each.rank, each.top)
        return [each for each in sampled if each.position + 1 >= self.prompt_length]

    def told_scores(self) -> tuple[PromptScore, ...]:
        """All of them, in order, once."""
        scores, self.scores = self.scores, {}
        return tuple(scores[position] for position in sorted(scores))

    def take(self, sampled: SampledToken) -> int:
        """Append a sampled token and see whether it ends the sequence; the token's index in the answer."""
        index = self.answered
        self.tokens.append(sampled.token)
        self.alone = False
        if sampled.token in self.stop_tokens:
            self.finish = "stop"
        elif self.answered >= self.max_tokens:
            self.finish = "length"
        return index
