"""How far a long command is, on stderr: a bar at a terminal, elsewhere a line each some seconds.

Used by the runtime's commands (quantize, calibration, GPTQ). Knows nothing of what is counted.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
_SPEED_SECONDS = 3600.0  # that the time left is told by: a pass through one layer of a large model takes minutes
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())

Update = Callable[[float, float], None]  # done, of all


@contextlib.contextmanager
def shown(what: str, *, line_seconds: float = LINE_SECONDS) -> Iterator[Update]:
    """`what` is under way until left."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(*_COLUMNS, console=console, speed_estimate_period=_SPEED_SECONDS) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        with _lines(what, line_seconds) as update:
            yield update


def line(what: str, done: float, total: float, seconds: float) -> str:
    """What a log shows. The time left is that which is gone, for what is left to do."""
    if total <= 0:
        return f"{what}: begins, {_duration(seconds)} so far"
    share = min(1.0, done / total)
    rest = seconds * (1 - share) / share if 0 < share < 1 else math.inf
    left = f", about {_duration(rest)} left" if math.isfinite(rest) else ""
    return f"{what}: {share:.0%} done in {_duration(seconds)}{left}"


@contextlib.contextmanager
def _lines(what: str, line_seconds: float) -> Iterator[Update]:
    started = time.monotonic()
    state = (0.0, 0.0)
    ended = threading.Event()

    def update(done: float, total: float) -> None:
        nonlocal state
        state = (done, total)

    def tell() -> None:
        sys.stderr.write(line(what, *state, time.monotonic() - started) + "\n")
        sys.stderr.flush()

    def run() -> None:
        while not ended.wait(line_seconds):
            tell()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()
        tell()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
