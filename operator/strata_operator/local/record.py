"""What a running `strata up` tells other commands of the same user: where its slots' control ports are, their secrets, its plan.

One file per deployment that only the user can read, there as long as the deployment runs. Written by `strata up`, read by `strata set-bits`.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from strata_operator.act.control_client import Endpoint
from strata_operator.errors import InvalidInputError
from strata_operator.local.errors import LocalInputError, NameInUseError
from strata_planner.contract.plan import Plan
from strata_planner.contract.store import cache_folder, write_whole
from strata_planner.contract.values import ContractError, Value, from_json, to_json

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_START_FIELD = 19  # of /proc/<pid>/stat, counted behind the name: clock ticks since the machine's start


class RunningDeployment(Value, frozen=True):
    """One `strata up`. `control_ports` and their secrets: by slot."""

    name: str
    pid: int
    control_keys: dict[str, str]
    control_ports: dict[str, int]
    plan: Plan
    started: str = ""  # `process_started` of the pid

    def endpoint(self, slot: str) -> Endpoint:
        return Endpoint(_HOST, self.control_ports[slot], self.control_keys[slot])


def folder() -> Path:
    """`$XDG_RUNTIME_DIR/strata`, where there is none the user's cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime, "strata") if runtime else cache_folder()) / "running"


@contextlib.contextmanager
def recorded(name: str, plan: Plan, slots: Mapping[str, Endpoint]) -> Iterator[None]:
    """The deployment can be found by its name while this lasts; it serves all the same where that cannot be written."""
    path = folder() / f"{name}.json"
    keys = {each: slot.secret for each, slot in slots.items()}
    ports = {each: slot.port for each, slot in slots.items()}
    running = RunningDeployment(name, os.getpid(), keys, ports, plan, process_started(os.getpid()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, to_json(running), mode=0o600)  # nobody else may read it at any time
    except OSError as error:
        log.warning("%s: %s; what runs here cannot be found by `strata set-bits`", path, error.strerror)
    try:
        yield
    finally:
        if (found := _read(path)) and found.pid == os.getpid():
            with contextlib.suppress(OSError):  # it names a process that has ended: nobody takes it for a running one
                path.unlink(missing_ok=True)


def running_deployment(name: str) -> RunningDeployment:
    """Raises InvalidInputError if this user runs no such deployment here."""
    found = {path.stem: _read(path) for path in folder().glob("*.json")}
    alive = {each: record for each, record in found.items() if record and _is_alive(record.pid, record.started)}
    if name not in alive:
        others = f"; running are: {', '.join(sorted(alive))}" if alive else ""
        raise InvalidInputError(
            name, [f"no deployment of this name runs here{others}; start one with `strata up -f FILE`"]
        )
    return alive[name]


def _read(path: Path) -> RunningDeployment | None:
    try:
        return from_json(path.read_bytes(), RunningDeployment)
    except (OSError, ContractError):  # gone meanwhile, or of another release
        return None


def _is_alive(pid: int, started: str) -> bool:
    """`started`: of the process that wrote it down; another one may have its number by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, who took the number
        return False
    return not started or started == process_started(pid)


def process_started(pid: int) -> str:
    """When a process began, in words that no other one of its number has; empty where the kernel does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return f"{boot}/{fields[_START_FIELD]}"


@contextlib.contextmanager
def claimed(name: str) -> Iterator[None]:
    """One `strata up` of a name for a user at a time. The kernel gives the claim back however its owner ends, so that none is
    ever stale. Raises NameInUseError, and LocalInputError where no claim can be written.
    """
    path = folder() / f"{name}.lock"
    try:
        file = _claim(path, name)
    except OSError as error:
        raise LocalInputError(
            f"{path}: {error.strerror}; there it is noted that '{name}' runs: make that folder writable and its disk not full, "
            "or set XDG_RUNTIME_DIR to another"
        ) from error
    with file:
        yield


def _claim(path: Path, name: str) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+"))  # noqa: PTH123  nobody else may read it at any time
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = file.read().strip() or "starting just now"
            raise NameInUseError(
                f"'{name}' runs here already (process {pid}): stop that one (`kill {pid}`), or give this deployment another metadata.name"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        opened.pop_all()
        return file
