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
from strata_planner.search.watch import Progress, Watch, unwatched

_EVERY_SECONDS = 0.2  # that the line is written anew


@contextmanager
def planning_line(request: PlanRequest, console: Console, *, quiet: bool = False) -> Iterator[Watch]:
    """What the search tells it is shown. `quiet`: not even at a terminal."""
    if quiet or not console.is_terminal:
        yield unwatched
        return
    with console.status("planning") as status:
        yield shown_by(request, status)


def shown_by(request: PlanRequest, status: Status, clock: Callable[[], float] = time.monotonic) -> Watch:
    """Writes no more often than people can read."""
    written: list[float] = []

    def watch(progress: Progress) -> None:
        now = clock()
        if not written or now - written[0] >= _EVERY_SECONDS:
            written[:] = [now]
            status.update(line_of(request, progress))

    return watch


def line_of(request: PlanRequest, progress: Progress) -> str:
    """In the goal's own unit."""
    best = (
        "no plan yet" if progress.value is None else f"best so far {Metric.for_request(request).said(progress.value)}"
    )
    limit = "time" if request.solver in ONE_PIPELINE else "work"
    return f"planning: {best}; {progress.share:.0%} of the limit of {limit}"
