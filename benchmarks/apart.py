"""Slots in network namespaces of their own, and packet rules that part them: as `main`, a slot that enters its namespace first.

Used by `benchmarks.kills`. No namespace has a name: each lives as long as the process that made it keeps it open, and with the last
one go bridge, links and rules, however that process ends. All traffic stays on this machine.
"""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

VARIABLE = "STRATA_BENCHMARK_NAMESPACES"  # slot -> file of its namespace, as JSON
OUTSIDE = "10.203.77.1"  # where gateway, controller and clients are
_SLOT = "10.203.77.{}"
_FIRST = 10
_LINK = "strata-bench"
_TOOLS = ("ip", "nsenter", "iptables-restore")
_CLONE_NEWNET = 0x40000000

From = Literal["its neighbours", "the gateway", "the controller", "everybody"]
_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The slot of `hanging_slot`, in the namespace that the environment gives it."""
    from benchmarks import hanging_slot  # noqa: PLC0415  heavy, and only slots need it

    given = list(arguments or ())
    name = given[given.index("--name") + 1]
    with open(json.loads(os.environ[VARIABLE])[name]) as namespace:  # noqa: PTH123  a namespace is no file to be read
        _check(_libc.setns(namespace.fileno(), _CLONE_NEWNET), f"enter {namespace.name}")
    return hanging_slot.main(arguments)


def missing() -> str:
    """What this machine lacks for it; empty: nothing."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', no '.join(absent)} on PATH (scripts/install-system-packages)"
    try:
        os.close(_new_namespace())
    except OSError as error:
        return f"no right to make a network namespace ({error}): run it as root"
    return ""


@dataclass(frozen=True)
class Apart:
    """The namespaces of some slots: file and address of each."""

    files: Mapping[str, str]
    hosts: Mapping[str, str]

    def cut(self, slot: str, off: From, control_port: int = 0) -> None:
        """From now on no packet passes between them, either way. Nobody is told. `control_port`: of the slot: what comes to it from outside comes from the
        controller, as long as there are no standing orders; to all others from the gateway.
        """
        match off:
            case "everybody":
                rules = [("-i eth0", "-o eth0")]
            case "its neighbours":
                rules = [(f"-s {host}", f"-d {host}") for name, host in self.hosts.items() if name != slot]
            case "the gateway":
                rules = [
                    (f"-s {OUTSIDE} -p tcp ! --dport {control_port}", f"-d {OUTSIDE} -p tcp ! --sport {control_port}")
                ]
            case "the controller":
                rules = [(f"-s {OUTSIDE} -p tcp --dport {control_port}", f"-d {OUTSIDE} -p tcp --sport {control_port}")]
        self._restore(
            slot, [line for came, goes in rules for line in (f"-A INPUT {came} -j DROP", f"-A OUTPUT {goes} -j DROP")]
        )

    def heal(self, slot: str) -> None:
        self._restore(slot, ())

    def _restore(self, slot: str, rules: Iterable[str]) -> None:
        """In place of all that there were, in one step."""
        table = "\n".join(("*filter", ":INPUT ACCEPT", ":OUTPUT ACCEPT", *rules, "COMMIT", ""))
        command = ["nsenter", f"--net={self.files[slot]}", "iptables-restore", "--wait"]
        subprocess.run(command, input=table, text=True, check=True)


@contextlib.contextmanager
def apart(slots: Sequence[str]) -> Iterator[Apart]:
    """A namespace for each, joined by a bridge in one more. Processes that are started meanwhile find them in their environment."""
    with contextlib.ExitStack() as held:
        bridge, *files = (_held(held) for _ in range(1 + len(slots)))
        _within(bridge, "link add bridge type bridge", "link set bridge up")
        _ip(f"link add {_LINK} type veth peer name outside netns {bridge}")
        held.callback(
            subprocess.run, ["ip", "link", "delete", _LINK], check=False
        )  # the last process may keep the bridge for a while
        _within(bridge, "link set outside master bridge up")
        _ip(f"address add {OUTSIDE}/24 dev {_LINK}", f"link set {_LINK} up")
        hosts = {slot: _SLOT.format(_FIRST + place) for place, slot in enumerate(slots)}
        for place, (slot, file) in enumerate(zip(slots, files, strict=True)):
            _within(file, f"link add eth0 type veth peer name slot{place} netns {bridge}", "link set lo up")
            _within(bridge, f"link set slot{place} master bridge up")
            _within(file, f"address add {hosts[slot]}/24 dev eth0", "link set eth0 up")
        os.environ[VARIABLE] = json.dumps(dict(zip(slots, files, strict=True)))
        held.callback(os.environ.pop, VARIABLE)
        yield Apart(dict(zip(slots, files, strict=True)), hosts)


def _held(held: contextlib.ExitStack) -> str:
    """The file of a new namespace, which is there until `held` ends."""
    number = _new_namespace()
    held.callback(os.close, number)
    return f"/proc/{os.getpid()}/fd/{number}"


def _new_namespace() -> int:
    """An open file of it. Raises OSError without the right."""
    made: list[int | OSError] = []

    def enter() -> None:  # a thread of its own, so that nothing else of this process is in there
        try:
            _check(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _within(namespace: str, *commands: str) -> None:
    for command in commands:
        subprocess.run(["nsenter", f"--net={namespace}", "ip", *command.split()], check=True)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
