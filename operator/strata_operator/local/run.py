"""From a planned deployment to served requests and back to nothing, in the foreground: the body of `strata up` and the demo.

`serve` starts everything, hands over once it is ready, and ends everything whatever happens: an error, Ctrl-C, SIGTERM.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console
from rich.logging import RichHandler

from strata_operator.local.children import SIGNALS
from strata_operator.local.deployment import Begun, LocalDeployment, LocalOptions
from strata_operator.local.errors import LocalInputError
from strata_operator.local.view import FILE_WIDTH, LoadingBars
from strata_planner.contract.plan import Plan

log = logging.getLogger(__name__)
T = TypeVar("T")

WORKER = "strata-worker"


class Progress:
    """What is being done now, for people: a log line when it begins, and the last words when a signal ends it."""

    def __init__(self) -> None:
        self.doing = "starting"
        self.serving = False

    def enter(self, doing: str) -> None:
        self.doing = doing
        log.info("%s", doing)


class Stopped(SystemExit):
    """By a signal, with a shell's exit code, 128 + its number: whoever waits for what was asked for learns that it was not done."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


def run_until_stopped(body: Callable[[], Coroutine[Any, Any, None]], progress: Progress | None = None) -> None:
    """Run `body`; a signal cancels it, and what it started ends before this returns. Raises Stopped for a signal that came
    before it served: then what was asked for has not been done.
    """
    heard: list[int] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            heard.append(number)
            task.cancel()

        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await body()

    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(main())
    if heard and progress and not progress.serving:
        raise Stopped(heard[0])


def leave_on_signals() -> None:
    """Before anything is started: a signal ends this process in order, so that a child it waits for ends too. It says nothing: a line may just be being
    written, and another one within would fail, and the signal with it.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise Stopped(number)

    for number in SIGNALS:
        signal.signal(number, leave)


def interruptible(work: Callable[[], T]) -> T:
    """Do it in a thread of its own: the main one hears signals, also while a solver computes in C for seconds.

    A signal leaves the thread behind; `leaving_at_once` then ends the process without waiting for it.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
            done.set_exception(error)

    threading.Thread(target=run, name=WORKER, daemon=True).start()
    return done.result()


@contextlib.contextmanager
def leaving_at_once(progress: Progress) -> Iterator[None]:
    """Around everything that a signal may end: its last words, and an abandoned thread is not waited for."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end, Stopped):
            sys.stderr.write(f"strata: stopped while {progress.doing}; nothing is left running\n")
        if any(thread.name == WORKER and thread.is_alive() for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


@contextlib.asynccontextmanager
async def serve(
    plan: Plan, options: LocalOptions, console: Console, begun: Begun | None = None
) -> AsyncIterator[LocalDeployment]:
    """The running deployment, ready; bars on `console` until then."""
    async with contextlib.AsyncExitStack() as started:
        with LoadingBars(plan, console) as bars:
            deployment = LocalDeployment(plan, options, lambda: bars.show(deployment.slot_statuses), begun)
            await started.enter_async_context(deployment)
            await deployment.ready()
        yield deployment


@contextlib.contextmanager
def log_folder(wanted: Path | None) -> Iterator[Path]:
    """The processes' logs: where the user wants them, or in a temporary folder that goes with the processes.

    Raises LocalInputError where nothing can be written there.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = wanted or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="strata-")))
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"0")
        except OSError as error:
            fix = "name another folder with --logs" if wanted else "set TMPDIR to a folder that can be written"
            where = wanted or "the folder for temporary files"
            raise LocalInputError(f"{where}: {error.strerror}; the processes' logs are written there: {fix}") from error
        yield folder


def log_to(console: Console) -> None:
    """Our own log lines, between the bars."""
    if not console.is_terminal:
        console.width = FILE_WIDTH
    handler = RichHandler(console=console, show_path=False, show_level=False, log_time_format="%H:%M:%S")
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)
