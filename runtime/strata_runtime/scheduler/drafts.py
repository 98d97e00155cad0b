"""Drafts: tokens that may come next, guessed from text that is there already. Used by `speculation`.

Prompt lookup (Saxena 2023) finds where the last few tokens stood before and proposes what followed there. `Recent` does the same in the answers
that were given lately (as SuffixDecoding, arXiv 2411.04975, without its counts): agents and edits repeat themselves. A wrong guess costs rows of a step and changes no text.
A sequence's own text is searched as packed tokens: some 20 microseconds for 2,000 of them that hold nothing of the kind, 150 for 16,000. Recent answers, which every
sequence asks for, are looked up by what stands in them: a microsecond however many there are. That is learned in portions, two microseconds a token, since many answers
may end in one step; it takes some 13 MB in all.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

LONGEST, SHORTEST = 4, 2  # of the last tokens: how many must have stood together before, the more the better
_TOKEN_BYTES = array("I").itemsize
_SIZES = tuple(count * _TOKEN_BYTES for count in range(SHORTEST, LONGEST + 1))
MOST_RECENT = 1 << 14  # tokens of answers that are remembered at the least, and at most twice as many
PORTION = 128  # of them that are learned in a step


class Searched(Protocol):
    """What guesses are looked up in."""

    def after(self, pattern: bytes, most: int) -> list[int]:
        """At most so many tokens that followed the newest place of packed tokens that something follows."""


class Text:
    """Tokens that are appended to and searched."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._packed = bytearray()
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._packed) // _TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        self._packed += array("I", tokens)

    def last(self, count: int) -> bytes:
        return bytes(self._packed[-count * _TOKEN_BYTES :])

    def after(self, pattern: bytes, most: int) -> list[int]:
        packed, end = self._packed, len(self._packed) - 1
        while (place := packed.rfind(pattern, 0, end)) >= 0:
            if place % _TOKEN_BYTES == 0:
                start = place + len(pattern)
                return array("I", packed[start : start + most * _TOKEN_BYTES]).tolist()
            end = place + len(pattern) - 1
        return []


def lookup(own: Text, others: Sequence[Searched], most: int) -> list[int]:
    """At most so many tokens that followed the end of `own` before, in itself or in others: the longest match counts, its own first."""
    for count in range(min(LONGEST, len(own)), SHORTEST - 1, -1):
        pattern = own.last(count)
        for text in (own, *others):
            if found := text.after(pattern, most):
                return found
    return []


class Recent:
    """The answers that were given last: as many as there is room for since the room was last full, and those before."""

    def __init__(self, most: int = MOST_RECENT) -> None:
        self._most = most
        self._newer, self._older = _Answers(), _Answers()

    def add(self, answer: Sequence[int]) -> None:
        """To be learned."""
        kept = answer[-self._most :]
        if len(self._newer) + len(kept) > self._most:
            self._newer, self._older = _Answers(), self._newer
        self._newer.add(kept)

    def learn(self, most: int = PORTION) -> None:
        """So many tokens of what was added."""
        self._newer.learn(self._older.learn(most))

    def after(self, pattern: bytes, most: int) -> list[int]:
        return self._newer.after(pattern, most) or self._older.after(pattern, most)


class _Answers:
    """One behind the other, and where each of the patterns in them ended last."""

    def __init__(self) -> None:
        self._packed = bytearray()
        self._ends: dict[bytes, int] = {}
        self._unlearned: deque[_Part] = deque()

    def __len__(self) -> int:
        return len(self._packed) // _TOKEN_BYTES

    def add(self, answer: Sequence[int]) -> None:
        before = len(self._packed)
        self._packed += array("I", answer)
        self._unlearned.append(_Part(before, before, len(self._packed)))

    def learn(self, most: int) -> int:
        """At most so many tokens, the oldest first; how many more it might have been."""
        while self._unlearned and most > 0:
            part = self._unlearned.popleft()
            until = min(part.end, part.left + most * _TOKEN_BYTES)
            self._learn(part._replace(end=until))
            most -= (until - part.left) // _TOKEN_BYTES
            if until < part.end:
                self._unlearned.appendleft(part._replace(left=until))
        return most

    def _learn(self, part: "_Part") -> None:
        first = max(part.begin, part.left - _SIZES[-1])
        own = bytes(self._packed[first : part.end])
        for place in range(part.left - first, len(own), _TOKEN_BYTES):  # of what follows a pattern
            for size in _SIZES:
                if size <= place:
                    self._ends[own[place - size : place]] = first + place

    def after(self, pattern: bytes, most: int) -> list[int]:
        end = self._ends.get(pattern)
        return [] if end is None else array("I", self._packed[end : end + most * _TOKEN_BYTES]).tolist()


class _Part(NamedTuple):
    """Places in packed tokens: where an answer begins, where what is left of it does, and where that ends."""

    begin: int
    left: int
    end: int
