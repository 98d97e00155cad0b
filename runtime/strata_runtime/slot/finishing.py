"""A commit that waits for the steps under way of the roles that it ends. Used by the slot's control loop, which goes on meanwhile.

What is under way comes to its end within a step or two, and its tokens are the clients': ended in the midst, it would be computed again. Nobody waits where a slot
is lost, a step fails or hangs, or for longer than `FINISH_SECONDS`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from strata_runtime.slot.epoch import RunningRole

FINISH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Finishing:
    """`asking`: who gets the status behind the commit."""

    epoch: int
    begun: float = field(default_factory=time.monotonic)
    asking: set[bytes] = field(default_factory=set)

    def is_over(self, ending: Sequence[RunningRole]) -> bool:
        """Asked again and again; the leaders of these roles hear that they are to finish."""
        over = [role.finish() for role in ending]
        return all(over) or time.monotonic() > self.begun + FINISH_SECONDS
