"""While a plan is searched for: one line at a terminal with the best so far and how much of the limit is used up; nothing elsewhere.

Used by `strata plan` and `strata up` around `make_plan`; it goes when the plan is there.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

from strata_planner.question.request import ONE_PIPELINE, PlanRequest
from strata_planner.search.metric import Metric
from strata_planner.search.watch import Progress

_EVERY_SECONDS = 0.2  # that the line is written anew


class PlanningLine:
    """Written no more often than people can read. Without a `status` nothing is."""

    def __init__(
        self, request: PlanRequest, status: Status | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request, self._status, self._clock = request, status, clock
        self._written = -_EVERY_SECONDS

    def watch(self, progress: Progress) -> None:
        """What a search tells."""
        now = self._clock()
        if self._status is not None and now - self._written >= _EVERY_SECONDS:
            self._written = now
            self._status.update(line_of(self._request, progress))

    def say(self, doing: str) -> None:
        """What comes after the search."""
        if self._status is not None:
            self._status.update(doing)


@contextmanager
def planning_line(request: PlanRequest, console: Console, *, quiet: bool = False) -> Iterator[PlanningLine]:
    """`quiet`: not even at a terminal."""
    if quiet or not console.is_terminal:
        yield PlanningLine(request, None)
        return
    with console.status("planning") as status:
        yield PlanningLine(request, status)


def line_of(request: PlanRequest, progress: Progress) -> str:
    """In the goal's own unit."""
    best = (
        "no plan yet" if progress.value is None else f"best so far {Metric.for_request(request).said(progress.value)}"
    )
    limit = "time" if request.solver in ONE_PIPELINE else "work"
    return f"planning: {best}; {progress.share:.0%} of the limit of {limit}"
