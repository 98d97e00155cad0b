"""What time it is, for the controller and all that it calls: one value, so that a whole operator can live by another clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    """`now`: as objects are stamped. `seconds`: of no meaning but their difference; they only rise."""

    now: Callable[[], datetime] = _now
    seconds: Callable[[], float] = time.monotonic


SYSTEM_CLOCK = Clock()
