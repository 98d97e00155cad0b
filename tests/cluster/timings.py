"""How long the steps of a test took. Nothing is asserted about it; conftest prints all of it at the end of the session."""

import time
from dataclasses import dataclass, field
from datetime import timedelta

TOLD: list["Steps"] = []


@dataclass
class Steps:
    """Steps after a beginning. Making one starts the clock."""

    title: str
    marks: list[tuple[str, float]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        TOLD.append(self)

    def mark(self, step: str) -> None:
        """This has just happened."""
        self.marks.append((step, self.now()))

    def happened(self, step: str, after: timedelta) -> None:
        """This happened so long after the beginning (to the second, where the API server tells it)."""
        self.marks.append((step, after.total_seconds()))

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def __str__(self) -> str:
        return f"{self.title}: " + ", ".join(
            f"{step} {seconds:.2f} s" for step, seconds in sorted(self.marks, key=lambda mark: mark[1])
        )
