"""How far a search has come, for whoever waits for it: the best value so far, and how much of its limit is used up.

Called by the searches, often; told to `strata plan`, which shows it at a terminal. Changes nothing of what is found.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`value`: of the best plan so far by the request's metric, None before the first. `share`: of the limit of work (of one pipeline: of time) that is
    used up, 0 to 1; a search may end before.
    """

    value: float | None
    share: float


Watch = Callable[[Progress], None]


def unwatched(_progress: Progress) -> None:
    """Where nobody waits."""


def part_of(watch: Watch, place: int, count: int) -> Watch:
    """For the search `place` of `count` that follow each other; the best of those before it is kept."""

    def told(progress: Progress) -> None:
        watch(Progress(progress.value, (place + progress.share) / count))

    return told


def best_of_all(watch: Watch) -> Watch:
    """Never tells of less than it has told of before."""
    best: list[float] = []

    def told(progress: Progress) -> None:
        if progress.value is not None:
            best[:] = [max(*best, progress.value)] if best else [progress.value]
        watch(Progress(best[0] if best else None, progress.share))

    return told
