"""What the start of this process took, and its first load: a controller expects the next one to take as long.

Used by the slot's control loop, which tells it in its status.
"""

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
