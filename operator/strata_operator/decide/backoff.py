"""When what failed is tried again: exponentially later, and never later than a bound. Pure; times are the caller's clock.

Used by the controller for a deployment's look, for what the API server refused, and for plans that wait for something outside.
"""

from dataclasses import dataclass

FIRST_SECONDS = 1.0
MOST_SECONDS = 300.0
_MOST_DOUBLINGS = 20  # beyond the bound in any case


@dataclass(frozen=True, slots=True)
class Backoff:
    """After `failures` in a row, nothing is tried before `until`."""

    failures: int = 0
    until: float = float("-inf")

    def waits(self, now: float) -> bool:
        return now < self.until

    def failed(self, now: float, first_seconds: float = FIRST_SECONDS) -> "Backoff":
        """One failure more."""
        return Backoff(self.failures + 1, now + seconds_after(self.failures + 1, first_seconds))


def seconds_after(failures: int, first_seconds: float = FIRST_SECONDS) -> float:
    """1, 2, 4, ... seconds, at most five minutes."""
    return min(MOST_SECONDS, first_seconds * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)) if failures > 0 else 0.0
