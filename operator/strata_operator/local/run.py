"""From a planned deployment to served requests and back to nothing, in the foreground: the body of `strata up` and the demo.

`serve` starts everything, hands over once it is ready, and ends everything whatever happens: an error, Ctrl-C, SIGTERM.
"""

import asyncio
import contextlib
import logging
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from strata_operator.local.deployment import LocalDeployment, LocalOptions
from strata_operator.local.view import FILE_WIDTH, LoadingBars
from strata_planner.contract.plan import Plan

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOPPED = 0  # exit code: ending when asked to is no failure


def run_until_stopped(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `body`; a signal cancels it, and what it started ends before this returns."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await body()

    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(main())


def leave_on_signals() -> None:
    """Before anything is started: a signal ends this process in order, so that a child it waits for ends too."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(STOPPED)

    for number in SIGNALS:
        signal.signal(number, leave)


@contextlib.asynccontextmanager
async def serve(plan: Plan, options: LocalOptions, console: Console) -> AsyncIterator[LocalDeployment]:
    """The running deployment, ready; bars on `console` until then."""
    async with contextlib.AsyncExitStack() as started:
        with LoadingBars(plan, console) as bars:
            deployment = LocalDeployment(plan, options, lambda: bars.show(deployment.slot_statuses))
            await started.enter_async_context(deployment)
            await deployment.ready()
        yield deployment


@contextlib.contextmanager
def log_folder(wanted: Path | None) -> Iterator[Path]:
    """The processes' logs: where the user wants them, or in a temporary folder that goes with the processes."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="strata-") as folder:
        yield Path(folder)


def log_to(console: Console) -> None:
    """Our own log lines, between the bars."""
    if not console.is_terminal:
        console.width = FILE_WIDTH
    handler = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)
