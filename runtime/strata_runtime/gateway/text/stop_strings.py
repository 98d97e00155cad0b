"""Stop strings, found in streamed text across token boundaries and never emitted.

Used by `choice`; knows no tokens. What it emits does not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Screened:
    """Text that may be shown, and the stop string that ended it."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopStrings:
    """Holds back the end of the text while it could still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._pending = ""

    def push(self, text: str) -> Screened:
        """Take the next piece. The stop string that is complete first wins, of several the one that began first."""
        self._pending += text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._pending.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            return Screened(self._take(start), stop)
        return Screened(self._take(len(self._pending) - self._held_back()))

    def flush(self) -> str:
        """The answer is over: what was held back is text after all."""
        return self._take(len(self._pending))

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text

    def _held_back(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        longest = min(len(self._pending), max((len(stop) for stop in self._stops), default=1) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(stop.startswith(self._pending[-n:]) for stop in self._stops)), 0
        )
