"""What a running `strata up` tells other commands of the same user: where its slots' control ports are, their secrets, its plan.

One file per deployment that only the user can read, there as long as the deployment runs. Written by `strata up`, read by `strata set-bits`.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from strata_operator.act.control_client import Endpoint
from strata_operator.errors import InvalidInputError
from strata_planner.contract.plan import Plan
from strata_planner.contract.store import cache_folder, write_whole
from strata_planner.contract.values import ContractError, Value, from_json, to_json

_HOST = "127.0.0.1"


class RunningDeployment(Value, frozen=True):
    """One `strata up`. `control_ports` and their secrets: by slot."""

    name: str
    pid: int
    control_keys: dict[str, str]
    control_ports: dict[str, int]
    plan: Plan

    def endpoint(self, slot: str) -> Endpoint:
        return Endpoint(_HOST, self.control_ports[slot], self.control_keys[slot])


def folder() -> Path:
    """`$XDG_RUNTIME_DIR/strata`, where there is none the user's cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime, "strata") if runtime else cache_folder()) / "running"


@contextlib.contextmanager
def recorded(name: str, plan: Plan, slots: Mapping[str, Endpoint]) -> Iterator[None]:
    """The deployment can be found by its name while this lasts. Of two of one name, the one that was started last is found."""
    path = folder() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys = {each: slot.secret for each, slot in slots.items()}
    running = RunningDeployment(name, os.getpid(), keys, {each: slot.port for each, slot in slots.items()}, plan)
    write_whole(path, to_json(running), mode=0o600)  # nobody else may read it at any time
    try:
        yield
    finally:
        if (found := _read(path)) and found.pid == os.getpid():
            path.unlink(missing_ok=True)


def running_deployment(name: str) -> RunningDeployment:
    """Raises InvalidInputError if this user runs no such deployment here."""
    found = {path.stem: _read(path) for path in folder().glob("*.json")}
    alive = {each: record for each, record in found.items() if record and _is_alive(record.pid)}
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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, who took the number
        return False
    return True
