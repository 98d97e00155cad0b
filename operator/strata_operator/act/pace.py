"""How long the controller waits after a look for what comes with the change that woke it: events come in bursts.

Not long after a change, of which a dozen looks follow; longer where looks go on and on. Called by the controller's loop; knows no clock.
"""

from dataclasses import dataclass

LONGEST_SECONDS, SHORTEST_SECONDS = 0.1, 0.01
BUSY_TIMES = 3.0  # a look's own processor time: it takes a quarter of a core at most
AT_ONCE, A_SECOND = 24.0, 3.0  # short pauses in a row, and how many come back in a second


@dataclass
class Pace:
    """`left`: short pauses that may follow each other; `at`: when that was so."""

    left: float = AT_ONCE
    at: float = 0.0

    def pause(self, now: float, busy_seconds: float) -> float:
        """Seconds to wait after a look that took so much of a processor."""
        self.left, self.at = min(AT_ONCE, self.left + A_SECOND * (now - self.at)), now
        if self.left < 1:
            return LONGEST_SECONDS
        self.left -= 1
        return min(LONGEST_SECONDS, max(SHORTEST_SECONDS, BUSY_TIMES * busy_seconds))
