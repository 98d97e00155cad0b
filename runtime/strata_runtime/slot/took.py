"""What the start of this process took, and its first load: a controller expects the next one to take as long.

Used by the slot's control loop, which tells it in its status.
"""

import os
import time
from pathlib import Path

from strata_planner.contract.control import PrepareState, Took


class FirstLoad:
    """`start_seconds`: from the process' birth until it listens. What is loaded later may lie there already, and tells nothing of a start."""

    def __init__(self, start_seconds: float) -> None:
        self._start_seconds = start_seconds
        self._began: float | None = None
        self._took: Took | None = None

    def look(self, state: PrepareState, now: float) -> Took | None:
        """None until something has been loaded. `now`: seconds of any clock. One that takes the place of another goes on from what that has loaded."""
        if self._took is not None:
            return self._took
        if state.phase not in ("loading", "prepared"):
            self._began = None
            return None
        if self._began is None:
            self._began = now
        if state.phase == "prepared":
            self._took = Took(round(self._start_seconds, 3), round(now - self._began, 3), state.layers_total)
        return self._took


def age_seconds(stat: Path = Path("/proc/self/stat")) -> float:
    """Since this process was started or forked (proc_pid_stat(5), field 22); 0 where the kernel does not tell."""
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):  # not Linux
        return 0.0
