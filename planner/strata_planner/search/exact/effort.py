"""What an exact search may take: work, which is the same on every machine and beside every other load, and the clock's time, for safety.

Called by the room's searches, which count the numbers they weigh, and by layouts, which say how many that may be.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from strata_planner.search.exact.problem import StopReason

CALL = 5_000  # numbers that are weighed in the time that an array's few operations take, however short it is


@dataclass
class Effort:
    """`latest`: on the clock, as `time.monotonic` tells it; `work`: numbers that may be weighed, and `spent` of them. `whole`: what this is a part of, from
    which is spent what is spent here.
    """

    latest: float = math.inf
    work: float = math.inf
    spent: float = 0.0
    whole: "Effort | None" = None

    @classmethod
    def of(cls, seconds: float, work: float = math.inf) -> "Effort":
        """From now on."""
        return cls(time.monotonic() + seconds, work)

    @property
    def seconds(self) -> float:
        return self.latest - time.monotonic()

    @property
    def ended_by(self) -> StopReason | None:
        """None where something is left of both."""
        if self.spent >= self.work:
            return StopReason.WORK_LIMIT
        return StopReason.TIME_LIMIT if self.seconds <= 0 else None

    @property
    def share_ended_by(self) -> StopReason:
        """What a part of it ends by (`until`)."""
        return self.ended_by or (StopReason.WORK_LIMIT if math.isfinite(self.work) else StopReason.TIME_LIMIT)

    def spend(self, numbers: float) -> None:
        self.spent += numbers
        if self.whole is not None:
            self.whole.spend(numbers)

    def part(self, parts: int) -> "Effort":
        """One of so many of what is left."""
        latest = time.monotonic() + self.seconds / parts
        return Effort(latest, (self.work - self.spent) / parts, whole=self)

    def parts(self, count: int) -> Iterator["Effort"]:
        """So many, each its part of what those before it have left when it is asked for."""
        return (self.part(left) for left in range(count, 0, -1))

    def until(self, share: float) -> Callable[[], bool]:
        """Tells whether that share of what is left now has been taken: of the time only where work has no limit, for it is not the same each time."""
        if math.isfinite(self.work):
            most = self.spent + share * (self.work - self.spent)
            return lambda: self.spent >= most or self.ended_by is not None
        latest = time.monotonic() + share * self.seconds
        return lambda: time.monotonic() >= latest
