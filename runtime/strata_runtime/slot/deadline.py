"""When a step counts as hung: whoever is to get on with it has not, for far longer than it takes by the plan and than it ever took.

Asked by `RunningRole` at each look of its slot's control loop, of its own worker and, where it leads, of the stages behind it. Pure: time is what looks count.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

TIMES = 5.0  # what was planned or seen
FIRST_TIMES = 4.0  # before a first step has ended: kernels are made, pages of weights come from a disk
LOAD_TIMES = 10.0  # as long as a step a load may be still: it waits for disks and networks
# Of the time between two looks: who was stopped, or waited for a processor, has seen nothing of what lies between.
MOST_COUNTED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Stillness:
    """Of one worker. `moved` differs whenever it has got on; `seconds` since it has not, `longest` of those that ended by themselves."""

    moved: Hashable = None
    seconds: float = 0.0
    longest: float = 0.0


def after_look(before: Stillness, moved: Hashable, seconds: float) -> Stillness:
    """`moved`: None where it has nothing to do. `seconds`: since the look before."""
    if moved is None or moved != before.moved:
        return Stillness(moved, 0.0, max(before.longest, before.seconds))
    return replace(before, seconds=before.seconds + min(max(seconds, 0.0), MOST_COUNTED_SECONDS))


def seconds_allowed(least: float, planned: float, longest: float, *, is_first: bool) -> float:
    """How long it may be still. `least` 0: for ever. `planned`: of a step; `longest`: that it was, and got on."""
    if least <= 0:
        return math.inf
    return max(least, TIMES * planned, TIMES * longest) * (FIRST_TIMES if is_first else 1)


class Deadline:
    """One worker's, look after look."""

    def __init__(self, least: float, planned: float) -> None:
        self._least, self._planned = least, planned
        self._still = Stillness()
        self._looked = math.inf
        self._reason = ""

    def look(self, moved: Hashable, now: float, *, is_first: bool) -> str:
        """For how long it has not got on, where that is too long; empty where it is not."""
        self._still = after_look(self._still, moved, now - self._looked)
        self._looked = now
        allowed = self.allowed(is_first=is_first)
        if self._still.seconds < allowed:
            self._reason = ""
        elif not self._reason:  # as it was noticed: a status that changes at every look would be sent at every look
            self._reason = f"has not got on for {self._still.seconds:.1f} s, with {allowed:g} allowed"
        return self._reason

    def left(self, *, is_first: bool) -> float:
        """Seconds that it may still be still, by what was seen at the last look."""
        return max(0.0, self.allowed(is_first=is_first) - self._still.seconds)

    def allowed(self, *, is_first: bool) -> float:
        """Seconds that it may be still in all."""
        return seconds_allowed(self._least, self._planned, self._still.longest, is_first=is_first)
