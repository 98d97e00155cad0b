"""Speaks to the launcher, the parent of all local processes: start this module, tell me when it ends.

The launcher (`python -m strata_runtime.slot.launcher`) has imported torch once for all. It ends every child when its stdin
ends, so that nothing outlives this process however it ends. `strata up` begins its imports while it plans; the local deployment uses it.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from strata_operator.local.children import held_child
from strata_operator.local.errors import CrashedError
from strata_planner.contract.environment import SLOT_ENVIRONMENT

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "strata_runtime.slot.launcher")
LAUNCHER_LOG = "launcher.log"
END_SECONDS = 10.0  # the launcher itself gives its children 3 s


class Child:
    """One started process. `ended` becomes its exit code, negative for a signal."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        """End it at once, if it has not ended yet."""
        if not self.ended.done():
            os.kill(self.pid, signal.SIGKILL)


def begin(log_file: Path, command: Sequence[str] = COMMAND) -> subprocess.Popen[bytes]:
    """A launcher that begins its imports now, for a `Launcher` to speak to."""
    with log_file.open("ab") as errors:
        return subprocess.Popen(  # noqa: S603  our own module
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**SLOT_ENVIRONMENT, **os.environ},
            start_new_session=True,  # Ctrl-C is ours to hear: we end the children in order
        )


@contextlib.contextmanager
def begun(log_file: Path, command: Sequence[str] = COMMAND) -> Iterator[subprocess.Popen[bytes]]:
    """The same, ended with the block whether or not somebody has spoken to it."""
    with held_child(lambda: begin(log_file, command)) as process:
        yield process


class Launcher:
    """A running launcher, made within a running loop; then `spawn`, at last `close`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ids = itertools.count()
        self._starting: dict[str, asyncio.Future[Child]] = {}
        self._children: dict[int, Child] = {}
        self._ready = asyncio.get_running_loop().create_future()
        self._gone: CrashedError | None = None
        self._reader = asyncio.create_task(self._read())

    @property
    def has_imported(self) -> bool:
        """Whether it forks already."""
        return self._ready.done()

    async def spawn(
        self, module: str, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str]
    ) -> Child:
        """Start `python -m module arguments` as a fork; `environment`: what it gets beside the launcher's own.

        Raises CrashedError if the launcher is gone.
        """
        await asyncio.shield(self._ready)
        if self._gone is not None:
            raise self._gone
        name = str(next(self._ids))
        self._starting[name] = asyncio.get_running_loop().create_future()
        request = {
            "id": name,
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": str(log_file),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # who reads its answers finds that it is gone
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return await self._starting[name]

    async def close(self, *, at_once: bool = False) -> None:
        """End every child and the launcher; returns when all are gone. `at_once`: without time to end in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if at_once and self._process.poll() is None:
            for child in self._children.values():
                child.kill()
            self._process.kill()  # it may be importing still, and hear nothing; children of it die with it
        try:
            await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the launcher did not end by itself within %g s", END_SECONDS)
            for child in self._children.values():
                child.kill()
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await self._reader
        self._starting.clear()

    async def _read(self) -> None:
        lines = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), self._process.stdout
        )
        async for line in lines:
            self._take(json.loads(line))
        transport.close()
        self._lost(CrashedError("the parent of all local processes has ended; they end with it"))

    def _take(self, message: dict[str, int]) -> None:
        if "ready" in message:
            self._ready.set_result(None)
        elif "id" in message:
            child = self._children[message["pid"]] = Child(message["pid"])
            starting = self._starting.pop(str(message["id"]))
            if not starting.done():  # nobody waits for it any more: everything is about to end
                starting.set_result(child)
        else:
            self._children.pop(message["pid"]).ended.set_result(message["exit"])

    def _lost(self, error: CrashedError) -> None:
        """Nobody waits for ever, now or later; an error that nobody waits for is no warning either."""
        self._gone = error
        for future in (self._ready, *self._starting.values()):
            if not future.done():
                future.set_exception(error)
            if not future.cancelled():
                future.exception()
        for child in self._children.values():
            child.ended.set_result(-signal.SIGKILL)
        self._children.clear()
