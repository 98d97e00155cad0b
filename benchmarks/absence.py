"""The controller away: its process is stopped while a slot is lost, and goes on later. As a program it is the process that does so: `python -m benchmarks.absence`.

Used by `benchmarks.faults`, whose own process is the controller, and so cannot do it itself. One line of JSON on stdin says what is to be done;
one on stdout tells the moments, in seconds of the machine's steady clock.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from benchmarks.apart import Apart

AFTER_SECONDS = 2.0  # so long streams are left to themselves once an order is carried out
_CARRIED_OUT = re.compile(r"^strata_standing_orders_total\S* (\S+)$", re.MULTILINE)
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Absence:
    """`pid`: of the victim. `url`: of the gateway whose standing order is waited for; empty: the controller is away for `seconds`. `namespaces`: the victim is cut
    off from everybody, not killed, and comes back while the controller is still away.
    """

    controller: int
    victim: str
    pid: int
    url: str = ""
    seconds: float = 0.0
    namespaces: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Moments:
    """Of the loss, of what was done about it by an order, and of the controller's return."""

    lost: float
    carried_out: float | None
    back: float


def play(absence: Absence) -> Moments:
    """Blocks, and stops this process meanwhile. Raises RuntimeError where no order was carried out."""
    command = [sys.executable, "-m", __name__]
    told = subprocess.run(command, input=json.dumps(asdict(absence)), capture_output=True, text=True, check=False)
    if told.returncode:
        raise RuntimeError(f"the controller was not away as wanted: {told.stderr[-2000:]}")
    return Moments(**json.loads(told.stdout))


def main() -> None:
    absence = Absence(**json.loads(sys.stdin.read()))
    before = _carried_out(absence.url)
    done: float | None = None
    os.kill(absence.controller, signal.SIGSTOP)
    try:
        lost = time.monotonic()
        with _lost(absence):
            if absence.url:
                done = _until_more(absence.url, before)
            else:
                time.sleep(absence.seconds)
        if absence.url:
            time.sleep(AFTER_SECONDS)
    finally:
        back = time.monotonic()
        os.kill(absence.controller, signal.SIGCONT)
    sys.stdout.write(json.dumps(asdict(Moments(lost, done, back))))


@contextlib.contextmanager
def _lost(absence: Absence) -> Iterator[None]:
    if not absence.namespaces:
        os.kill(absence.pid, signal.SIGKILL)
        yield
        return
    net = Apart(absence.namespaces, {})
    net.cut(absence.victim, "everybody")
    try:
        yield
    finally:
        net.heal(absence.victim)


def _until_more(url: str, before: float) -> float:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _carried_out(url) <= before:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no standing order was carried out within {_PATIENCE_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)
    return time.monotonic()


def _carried_out(url: str) -> float:
    if not url:
        return 0.0
    with urllib.request.urlopen(f"{url}/metrics", timeout=_PATIENCE_SECONDS) as answer:  # noqa: S310  an http address of our own
        return sum(map(float, _CARRIED_OUT.findall(answer.read().decode())))


if __name__ == "__main__":
    main()
