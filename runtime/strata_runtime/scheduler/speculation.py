"""Speculation: how many drafted tokens a step verifies beside each decoding sequence's own. Used by the scheduler.

Exact by construction: a draw is a function of (seed, position) and of the logits there, so that a draft is accepted while it equals what is drawn,
and the first draw that differs is the next token itself. The text is that without speculation, at any temperature.

Drafts are looked up in texts, or drafted one after the other: by the model's own weights at fewer bits, in steps of their own, or by a small model
beside the leader, all at once. The sequences of a round are drafted together and verified together. A sequence's round ends with its verification.

What it costs is known from `Pace`, by rows; what it brings from each sequence's own guesses, which are compared with what is drawn whether or
not they were computed. `auto` takes the number of drafts with the most tokens a second that it expects, which is none where guesses are bad or
rows are dear. Now and then it takes none, or one more, so that what it knows of their cost does not grow old. What it may verify in vain is bounded
whatever it expects: guesses that were right pay for wrong ones (`Credit`).
"""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

from strata_planner.contract.plan import Speculation as Wish
from strata_planner.contract.steps import Pace
from strata_runtime.scheduler.drafts import Recent, Text, lookup

_NEWEST = 0.1  # weight of the newest guess in a sequence's share of right ones
_FIRST_SHARE = 0.5  # of guesses that are right, before any was compared
_SELDOM, _SELDOM_STEPS = 0.1, 4  # a sequence whose guesses are so bad is looked at once in so many steps
_LONGEST_REST = 16  # steps without a look, after looks that found nothing: 1, 2, 4, ...
_PLAIN_STEPS, _CURIOUS_STEPS = 64, 50  # one in so many steps has no drafts; one has one more, where guesses are good
MARGIN = 1.15  # as much more must be expected of drafts than of none
_FIRST_AGREEMENT = 0.7  # of tokens that other weights draft, before any was verified
_FIRST_CREDIT = 8.0  # rows that may be computed for nothing before any guess was right, ...
_ROWS_CREDIT, _HIT_CREDIT = (
    0.01,
    4.0,
)  # ... further ones for each row of a sequence's own, and for each guess that was right
_UNDECIDED = -1
_DRAFTED = frozenset({"selfPrecision", "draft", "eagle"})  # modes that look nothing up


@dataclass(slots=True)
class Guesses:
    """Of one sequence: its text as it is searched, what is guessed to come next, and how good that was."""

    text: Text
    next: list[int] = field(default_factory=list)
    taken: int = 0  # of `next`: those that are being verified
    right: float = _FIRST_SHARE
    steps: int = 0
    shares: bool = True  # with recent answers: reads them, and becomes one
    rest: int = 0  # steps until the next look
    misses: int = 0  # looks that found nothing since one did
    agreed: float = _FIRST_AGREEMENT  # share of right ones among those that other weights drafted
    # Of `next`, in this round: so many are drafted by other weights; 0: none, they were looked up.
    goal: int = _UNDECIDED

    @property
    def is_undecided(self) -> bool:
        """Its round has not begun."""
        return self.goal == _UNDECIDED

    @property
    def is_drafted(self) -> bool:
        return self.goal > 0

    @property
    def is_drafting(self) -> bool:
        return len(self.next) < self.goal

    def draft(self, token: int, *, ends: bool) -> None:
        """Other weights have drawn this. Drafting is over where nothing can be drawn, or nothing follows."""
        if token >= 0:
            self.next.append(token)
        if token < 0 or ends:
            self.end_drafting()

    def end_drafting(self) -> None:
        """What there is goes to its verification."""
        self.goal = min(self.goal, len(self.next))

    def drafted_from(self, right: int) -> int:
        """Tokens of this round that the next ones were drafted from and that were right, if so many guesses were: the last one has no KV yet."""
        return min(right, len(self.next) - 1) if self.is_drafted else 0

    def seen(self, drawn: Listed[int]) -> None:
        """Tokens that came next, of which the last was not guessed or not verified: the round is over."""
        share = self.agreed if self.is_drafted else self.right
        for guessed, token in zip(self.next, drawn, strict=False):
            hit = guessed == token
            share += _NEWEST * (hit - share)
            if not hit:
                break
        if self.is_drafted:
            self.agreed = share
        else:
            self.right = share
        self.text.extend(drawn)
        self.next, self.taken, self.goal = [], 0, _UNDECIDED


@dataclass
class Credit:
    """Rows that `auto` may yet compute for guesses that turn out wrong. Text that drafts badly costs one row in a hundred, and its lucky guesses.

    A guess is right or wrong whether or not it was verified, so that text which begins to repeat itself earns what it needs.
    """

    most: int  # what is kept for later
    rows: float = _FIRST_CREDIT

    def seen(self, *, wrong: int, right: int) -> None:
        """Behind a row of a sequence's own: guesses that were verified and wrong, and such that were right."""
        self.rows = min(self.rows - wrong + _ROWS_CREDIT + _HIT_CREDIT * right, self.most)


@dataclass
class Counts:
    """For metrics: verifications, tokens drafted for them, and those that were accepted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Speculation:
    """`most_rows`: of a step's sequences and drafts. `pace`: what steps take by their rows. `drafts`: there are other weights to draft with."""

    def __init__(self, wish: Wish, most_rows: int, pace: Pace, *, drafts: bool = False) -> None:
        self.counts = Counts()
        self.most_rows = most_rows
        self.draft_pace = Pace()  # of steps that draft a token of each sequence
        self._wish = wish
        self._drafts = drafts
        self._recent = Recent()
        self._pace = pace
        self._steps = 0
        self._rounds = 0
        self._agreed = _FIRST_AGREEMENT  # over all sequences: what a new one starts with, ...
        self._right = _FIRST_SHARE  # ... likewise of what was looked up
        self._credit = Credit(most_rows)

    @property
    def is_on(self) -> bool:
        return self._wish.mode != "none"

    def guesses(self, tokens: Listed[int], *, shares: bool) -> Guesses:
        """Of a sequence that has none yet."""
        right = self._right if self._wish.mode == "auto" else _FIRST_SHARE
        return Guesses(Text(tokens), shares=shares, right=right, agreed=self._agreed)

    def room(self, sequences: int) -> int:
        """For drafts in a step of so many sequences."""
        return max(0, self.most_rows - sequences)

    def begin(self, sequences: Listed[tuple[Guesses, int]], *, may_draft: bool) -> None:
        """A round of each: what may come next, or how much of it other weights are to draft. With how many tokens of it may be verified."""
        self._recent.learn()
        for guesses, most in sequences:
            guesses.goal = 0
            if self._wish.mode not in _DRAFTED:
                self._look_up(guesses, most)
        if self._drafts and may_draft and sequences:
            count = self._draft_count([guesses for guesses, most in sequences])
            for guesses, most in sequences:
                if (goal := min(count, most)) > 0:
                    guesses.goal, guesses.next = goal, []

    def choose(self, sequences: Listed[Guesses]) -> None:
        """How many of its guesses each sequence has verified in a step of all of them: of what was drafted for it all that there is room for."""
        room = self.room(len(sequences))
        looked_up = [each for each in sequences if not each.is_drafted]
        is_auto = self._wish.mode == "auto"
        credit = max(0, int(self._credit.rows)) if is_auto else room
        count = self._best(looked_up, room) if is_auto and looked_up and credit else self._wish.tokens
        for each in sequences:
            most = each.goal if each.is_drafted else min(count, credit)
            each.taken = min(most, len(each.next), room)
            room -= each.taken
            credit -= 0 if each.is_drafted else each.taken

    def accepted(self, guesses: Guesses, drawn: Listed[int]) -> int:
        """Of what was drawn at the positions of a verification, one behind the other: how many tokens belong to the text."""
        count = 1
        while count <= guesses.taken and count < len(drawn) and drawn[count - 1] == guesses.next[count - 1]:
            count += 1
        if guesses.next and not guesses.is_drafted:
            right = count - 1 if guesses.taken else int(drawn[0] == guesses.next[0])
            self._right += _NEWEST * (bool(right) - self._right)
            self._credit.seen(wrong=max(0, guesses.taken - right), right=right)
        else:
            self._credit.seen(wrong=0, right=0)
        if guesses.taken:
            self.counts.drafts += 1
            self.counts.draft_tokens += guesses.taken
            self.counts.accepted_tokens += count - 1
            if guesses.is_drafted:
                self._agreed += _NEWEST * ((count - 1) / min(count, guesses.taken) - self._agreed)
        return count

    def ended(self, guesses: Guesses | None, answer: Listed[int]) -> None:
        """A sequence is over: its answer may be what others repeat."""
        if self._wish.mode in {"auto", "suffix"} and (guesses is None or guesses.shares):
            self._recent.add(answer)

    def _look_up(self, guesses: Guesses, most: int) -> None:
        guesses.steps += 1
        guesses.rest -= 1
        if most <= 0 or guesses.rest > 0 or (guesses.right < _SELDOM and guesses.steps % _SELDOM_STEPS):
            return
        others = (self._recent,) if self._wish.mode != "ngram" and guesses.shares else ()
        guesses.next = lookup(guesses.text, others, min(most, self._wish.tokens))
        guesses.misses = 0 if guesses.next else min(guesses.misses + 1, _LONGEST_REST)
        guesses.rest = min(_LONGEST_REST, (1 << guesses.misses) >> 1)

    def _draft_count(self, sequences: Listed[Guesses]) -> int:
        """Tokens that other weights draft for each of these sequences."""
        rows = len(sequences)
        most = min(self._wish.tokens, self.room(rows) // rows)
        if self._wish.mode in _DRAFTED:
            return most
        self._rounds += 1
        is_odd = self._rounds % _PLAIN_STEPS == 0  # what is not done else: so that its cost stays known
        if not self._pace.knows(rows) or not most:
            return 0
        if not self.draft_pace.knows(rows):
            return 1
        chosen, best = 0, self._most_by_look_up(sequences, self.room(rows))[1]
        for count in range(1, most + 1):
            tokens = sum(_expected(each.agreed, count) for each in sequences)
            seconds = count * self.draft_pace.decoding(rows) + self._pace.decoding(rows * (1 + count))
            if (rate := tokens / seconds) > best:
                chosen, best = count, rate
        return int(not chosen) if is_odd else chosen

    def _best(self, sequences: Listed[Guesses], room: int) -> int:
        """The number of guesses that were looked up a sequence, with the most expected tokens a second."""
        self._steps += 1
        rows = len(sequences)
        if self._steps % _PLAIN_STEPS == 0 or not self._pace.knows(rows) or not any(each.next for each in sequences):
            return 0
        chosen, _ = self._most_by_look_up(sequences, room)
        is_good = sum(each.right for each in sequences) >= _FIRST_SHARE * rows
        return chosen + (is_good and self._steps % _CURIOUS_STEPS == 0)

    def _most_by_look_up(self, sequences: Listed[Guesses], room: int) -> tuple[int, float]:
        """Guesses a sequence, and the tokens a second that are expected of them; of none as many more as drafts must bring."""
        rows = len(sequences)
        most = max((len(each.next) for each in sequences), default=0)
        chosen, best = 0, rows / self._pace.decoding(rows) * MARGIN
        for count in range(1, most + 1):
            more = sum(min(count, len(each.next)) for each in sequences)
            if more > room:
                break
            tokens = sum(_expected(each.right, min(count, len(each.next))) for each in sequences)
            if (rate := tokens / self._pace.decoding(rows + more)) > best:
                chosen, best = count, rate
        return chosen, best


def _expected(right: float, drafts: int) -> float:
    """Tokens of a verification: its own, and each draft if it and all before it are right."""
    return sum(right**count for count in range(drafts + 1))
