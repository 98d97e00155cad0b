"""Reading text that is still coming: each method is a generator that yields where it has to wait for more.

Used by `answer_parser`, whose grammar becomes plain procedural code this way. No method looks again at text that it
was done with, and what it decides does not depend on how the text was cut into pieces.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from strata_runtime.gateway.text.json_scanner import JsonScanner

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], None]

_SPACES = re.compile(r"\s*")


class TextReader:
    """The text from where reading has got to. `hold` keeps what is read next, in case it must be given back."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._held: list[str] | None = None

    def push(self, text: str) -> None:
        assert not self._closed, "text behind the end"
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """No more text will come."""
        self._closed = True

    def hold(self) -> None:
        self._held = []

    def release(self) -> str:
        """What was read since `hold`."""
        held, self._held = "".join(self._held or ()), None
        return held

    def peek(self) -> Reading[str]:
        """The next character, unread; empty at the end."""
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """As much as matches; `pattern` is a repeated character class."""
        pieces: list[str] = []
        while (yield from self.peek()):
            match = pattern.match(self._text, self._at)
            end = match.end() if match else self._at
            pieces.append(self._take(end))
            if end < len(self._text):
                break
        return "".join(pieces)

    def spaces(self) -> Reading[str]:
        return self.run(_SPACES)

    def one_of(self, texts: Sequence[str]) -> Reading[str]:
        """Read whichever of these comes next; empty where none does."""
        while True:
            found = min((text for text in texts if self._text.startswith(text, self._at)), key=len, default="")
            if found:
                return self._take(self._at + len(found))
            rest = self._text[self._at : self._at + max(map(len, texts), default=0)]
            if self._closed or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def words(self, text: str, *, may_be_cut: bool = False) -> Reading[bool]:
        """Read the words of `text`, with any or no white space before each; False at the first that is not there.

        `may_be_cut`: a word that only the end of all text cuts short counts as well.
        """
        for word in text.split():
            yield from self.spaces()
            if (yield from self.one_of((word,))):
                continue
            if not (may_be_cut and self._closed and word.startswith(self._text[self._at :])):
                return False
            self._take(len(self._text))
        return True

    def until(self, markers: Sequence[str], emit: Emit) -> Reading[bool]:
        """Emit the text before the first marker, which stays unread. False: the text ended without one."""
        pattern = _any_of(tuple(markers))
        while True:
            match = pattern.search(self._text, self._at) if markers else None
            sure = match.start() if match else len(self._text)
            if not (match or self._closed):
                sure -= self._begun_marker(markers)
            if sure > self._at:
                emit(self._take(sure))
            if match or self._closed:
                return match is not None
            yield

    def json(self, scanner: JsonScanner, emit: Emit) -> Reading[bool]:
        """Emit a JSON value as it comes. False: it is malformed here, or the text ended within it."""
        while (yield from self.peek()):
            end = scanner.scan(self._text, self._at)
            if end > self._at:
                emit(self._take(end))
            if scanner.complete or scanner.malformed:
                break
        return scanner.complete

    def _take(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(taken)
        return taken

    def _begun_marker(self, markers: Sequence[str]) -> int:
        """The length of the longest end of the text that could become a marker."""
        longest = min(max(map(len, markers), default=1) - 1, len(self._text) - self._at)
        ends = (self._text[len(self._text) - size :] for size in range(longest, 0, -1))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)


@lru_cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
