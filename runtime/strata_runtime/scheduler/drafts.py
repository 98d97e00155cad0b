"""Drafts: tokens that may come next, guessed from text that is there already. Used by `speculation`.

Prompt lookup (Saxena 2023) finds where the last few tokens stood before and proposes what followed there. `Recent` does the same in the answers
that were given lately (as SuffixDecoding, arXiv 2411.04975, without its counts): agents and edits repeat themselves. A wrong guess costs rows of a step and changes no text.
Searches go over packed tokens: some 20 microseconds for 2,000 of them that hold nothing of the kind, 150 for 16,000.
"""

from array import array
from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # of the last tokens: how many must have stood together before, the more the better
_TOKEN_BYTES = array("I").itemsize
MOST_RECENT = 1 << 14  # tokens of answers that are remembered


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

    def forget(self, count: int) -> None:
        """The first tokens."""
        del self._packed[: count * _TOKEN_BYTES]

    def after(self, pattern: bytes, most: int) -> list[int]:
        """What followed the newest place of a pattern that something follows."""
        packed, end = self._packed, len(self._packed) - 1
        while (place := packed.rfind(pattern, 0, end)) >= 0:
            if place % _TOKEN_BYTES == 0:
                start = place + len(pattern)
                return array("I", packed[start : start + most * _TOKEN_BYTES]).tolist()
            end = place + len(pattern) - 1
        return []


def lookup(own: Text, others: Sequence[Text], most: int) -> list[int]:
    """At most so many tokens that followed the end of `own` before, in itself or in others: the longest match counts, its own first."""
    for count in range(min(LONGEST, len(own)), SHORTEST - 1, -1):
        pattern = own.last(count)
        for text in (own, *others):
            if found := text.after(pattern, most):
                return found
    return []


class Recent:
    """The answers that were given last, one behind the other."""

    def __init__(self, most: int = MOST_RECENT) -> None:
        self._most = most
        self.text = Text()

    def add(self, answer: Sequence[int]) -> None:
        self.text.extend(answer[-self._most :])
        if len(self.text) > 2 * self._most:  # seldom, since all that stays is moved
            self.text.forget(len(self.text) - self._most)
