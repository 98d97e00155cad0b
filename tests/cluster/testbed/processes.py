"""Long-running programs of the testbed: started apart from their starter, known by pid files, ended by id.

Called by the control plane, the network, the nodes and the fleet. A later Python process finds a daemon by its directory and name.
"""

import contextlib
import os
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.testbed.world import start_time


class TestbedError(RuntimeError):
    """The testbed could not do what it was asked: the message has the last lines of the log that tells why."""

    __test__ = False  # not a test class, whatever pytest makes of the name


@dataclass(frozen=True)
class Daemon:
    """A program with a log and a pid file of its name in a directory."""

    name: str
    directory: Path

    @property
    def log(self) -> Path:
        """Everything it prints."""
        return self.directory / f"{self.name}.log"

    @property
    def _record(self) -> Path:
        return self.directory / f"{self.name}.pid"

    @property
    def pid(self) -> int | None:
        """Its process id while it runs, else None."""
        try:
            pid, started = self._record.read_text().split()
        except FileNotFoundError:
            return None
        return int(pid) if start_time(int(pid)) == started else None

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Start it in a session of its own, so that a Ctrl-C meant for the tests does not reach it; its process id."""
        self.directory.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            pid = os.posix_spawnp(
                command[0],
                list(command),
                {**os.environ, **(environment or {})},
                setsid=True,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, source, target) for source, target in ((null, 0), (log, 1), (log, 2))
                ],
            )
        finally:
            os.close(log)
            os.close(null)
        self._record.write_text(f"{pid} {start_time(pid)}\n")
        return pid

    def kill(self) -> None:
        """End it without a chance to tidy up; nothing happens where it does not run."""
        pid = self.pid
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _ended(pid), f"{self.name} to end after SIGKILL", 10)
        self._record.unlink(missing_ok=True)

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else "(no log)"
        )


def _ended(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # our own child stays a zombie until its status is read
    return start_time(pid) is None


COMMAND_SECONDS = 60.0
"""No command here takes as long, but those that wait for something and say how long."""


def call(*command: str, directory: Path | None = None) -> None:
    """One command that must succeed, and end; `TestbedError` with its complaint where it does not."""
    output_of(command, directory=directory)


def output_of(
    command: Sequence[str], *, stdin: str | None = None, directory: Path | None = None, seconds: float = COMMAND_SECONDS
) -> str:
    """What a command prints that must succeed within so long; `TestbedError` with its complaint where it does not."""
    try:
        done = subprocess.run(
            command, input=stdin, cwd=directory, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise TestbedError(f"{' '.join(command)} did not end within {seconds:g} s: {error.stderr!r}") from error
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def wait_until(
    condition: Callable[[], bool], what: str, timeout_seconds: float, daemons: Sequence[Daemon] = ()
) -> None:
    """Poll until the condition holds; `TestbedError` after the timeout, or at once when a daemon that it needs has ended.

    A look that costs something, as kubectl's do, is taken half of the time at most: what is waited for needs the processors too.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (looked := _looked(condition))[0]:
        for daemon in daemons:
            if daemon.pid is None:
                raise TestbedError(
                    f"{daemon.name} ended while waiting for {what}; its log ends:\n{daemon.last_words()}"
                )
        if time.monotonic() > deadline:
            logs = "\n".join(f"{daemon.log} ends:\n{daemon.last_words()}" for daemon in daemons)
            raise TestbedError(f"no {what} within {timeout_seconds:.0f} s\n{logs}")
        time.sleep(max(0.05, looked[1]))


def _looked(condition: Callable[[], bool]) -> tuple[bool, float]:
    """What a look showed, and how many seconds it took."""
    began = time.monotonic()
    return condition(), time.monotonic() - began


def answers(url: str, *, certificate_authority: Path | None = None) -> bool:
    """Whether an HTTP(S) address answers with a 2xx status."""
    context = ssl.create_default_context(cafile=str(certificate_authority)) if certificate_authority else None
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as response:
            return bool(200 <= response.status < 300)
    except OSError:
        return False
