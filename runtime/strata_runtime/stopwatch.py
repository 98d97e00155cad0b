"""How long the phases of a load or a start take: counted where they happen, told in the log (`contract.phases`). Knows no phase by name."""

import contextlib
import time
from collections.abc import Iterator
from logging import Logger

from strata_planner.contract.phases import Phase


class Stopwatch:
    """Seconds of each phase, summed over the times that it was gone through. For one thread."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begun

    def tell(self, log: Logger) -> None:
        for phase, seconds in self._seconds.items():
            log.info("%s", Phase(phase, seconds))
