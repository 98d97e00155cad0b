"""A closed world for one cluster: processes, mounts and a network of its own, made of Linux namespaces.

Every process of the cluster lives under the world's first process, so that ending that one ends all of them, with their mounts,
bridges, packet rules and open ports; what remains are control groups and one directory, which `World.destroy` sweeps. That holds
after a crash too: the next `create` finds the first process by its recorded id and start time. No address outside is reachable
from inside. Called by the command line (`__main__`); knows nothing of Kubernetes.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.testbed import cgroups

CHECKOUT = Path(__file__).resolve().parents[3]
ENVIRONMENT_VARIABLE = "STRATA_TESTBED"


class WorldError(RuntimeError):
    """The world cannot be made or entered: the message says what to do."""


@dataclass(frozen=True)
class World:
    """The world of a name; two worlds of unlike names may exist at once on one machine."""

    name: str = "testbed"

    @property
    def directory(self) -> Path:
        """All files of the world: data, sockets, logs, kubeconfigs."""
        return Path(tempfile.gettempdir()) / f"strata-{self.name}"

    @property
    def first_process(self) -> int | None:
        """The id of the living first process, None where there is none (an id that another process has now does not count)."""
        try:
            pid, started = (self.directory / "first-process").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == started else None

    def create(self, *, bound: bool) -> None:
        """Make the namespaces and their first process, after sweeping what an earlier world of this name left.

        `bound` ends the world when the calling process ends, however it ends; otherwise it lasts until `destroy`.
        """
        if os.geteuid() != 0:
            raise WorldError(f"namespaces and containers need root, this is user {os.geteuid()}: run with sudo")
        self.destroy()
        self.directory.mkdir(parents=True)
        bind = ["setpriv", "--pdeathsig", "KILL", "--"] if bound else []
        unshare = ["unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child=KILL", "--"]
        script = Path(__file__).with_name("first_process.py")
        with (self.directory / "first-process.log").open("wb") as log:
            process = subprocess.Popen(
                [*bind, *unshare, sys.executable, str(script), str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=not bound,
            )
        deadline = time.monotonic() + 10
        while self.first_process is None:
            if process.poll() is not None or time.monotonic() > deadline:
                output = (self.directory / "first-process.log").read_text().strip()
                raise WorldError(f"the namespaces could not be made: {output or 'no answer for 10 s'}")
            time.sleep(0.01)
        process.returncode = 0  # it stays; without this Popen's destructor warns of a process still running

    def enter(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Run a command inside, in the caller's working directory and terminal; its exit status."""
        first = self.first_process
        if first is None:
            raise WorldError(f"no testbed called {self.name!r} is up: python -m tests.cluster.testbed up")
        nsenter = ["nsenter", f"--target={first}", "--mount", "--net", "--pid", "--ipc", f"--wdns={Path.cwd()}", "--"]
        variables = {**os.environ, ENVIRONMENT_VARIABLE: str(self.directory), **(environment or {})}
        return subprocess.run([*nsenter, *command], env=variables, check=False).returncode

    def destroy(self) -> None:
        """End every process of the world and remove its control groups and files. Does nothing where there is no world."""
        first = self.first_process
        if first is not None:
            os.kill(first, signal.SIGKILL)
            _await_end(first)
        cgroups.remove(f"strata-{self.name}")
        if self.directory.exists():
            remove_tree(self.directory)


@contextlib.contextmanager
def fresh(world: World) -> Iterator[None]:
    """Make the world for the length of a `with` block; it ends with the block and with the process that opened it."""
    world.create(bound=True)
    try:
        yield
    finally:
        world.destroy()


def start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None where there is none (or only its unread exit status)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else fields[19]


def _await_end(pid: int) -> None:
    """The kernel ends all processes of a pid namespace before its first one is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)
        try:
            # Readable when the process has ended; a world of hundreds of containers takes some seconds.
            select.select([descriptor], [], [], 30)
        finally:
            os.close(descriptor)


def remove_tree(directory: Path) -> None:
    """Remove a directory, refusing where something is mounted below it: that would be someone else's files."""
    mounted = mounts_below(directory)
    if mounted:
        raise WorldError(f"not removing {directory}: {mounted[0]} is mounted in it; unmount it first")
    subprocess.run(["rm", "-rf", "--one-file-system", str(directory)], check=True, timeout=120)


def mounts_below(directory: Path) -> list[str]:
    """Mount points at or below a directory in this process's mount namespace, deepest first."""
    prefix = f"{directory}/"
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((point for point in points if f"{point}/".startswith(prefix)), key=len, reverse=True)
