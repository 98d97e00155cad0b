"""The nursery as a slot meets it: real forks, whose ends are told, and which end with whoever had use for them."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RANK = """
import os, sys
def main(arguments):
    named = dict(zip(arguments[::2], arguments[1::2]))
    own, segment = int(named["--socket"]), int(named["--segment"])
    open_ones = sorted(int(each) for each in os.listdir("/proc/self/fd"))
    os.write(own, repr((named["--rank"], os.read(segment, 99), len(os.listdir("/proc/self/task")), "json" in sys.modules)).encode())
    return int(os.read(own, 99) or b"7")
"""

# What a slot does at its start and when a role has ranks; told what to do by lines.
SLOT = """
import os, socket, sys
from strata_runtime.slot import nursery
nursery.PRELOADED, nursery.RANK = ("json", "a_rank"), "a_rank"
nursery.open_at_start()
say = lambda *said: print(*said, flush=True)
while line := sys.stdin.readline().strip():
    if line == "start":
        segment = os.memfd_create("segment")
        os.write(segment, b"shared")
        os.lseek(segment, 0, 0)
        ours, theirs = socket.socketpair()
        rank = nursery.the_nursery().start(["--rank", "1"], theirs.fileno(), segment)
        theirs.close(), os.close(segment)
        say(rank.pid, ours.recv(99).decode())
    elif line == "told":
        say(rank.wait(20))
    elif line == "forget":
        del rank
        say("forgotten")
    else:
        getattr(*{"kill": (rank, "kill"), "close": (ours, "close")}[line])()
        say("done")
"""


class SlotProcess:
    def __init__(self, folder: Path) -> None:
        (folder / "a_rank.py").write_text(RANK)
        paths = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            text=True,
        )

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def start(self) -> int:
        """The rank's process."""
        pid, _, said = self.tell("start").partition(" ")
        assert said == "('1', b'shared', 1, True)"
        return int(pid)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[SlotProcess]:
    slot = SlotProcess(tmp_path)
    yield slot
    slot.process.communicate(timeout=20)


def ends(process: int) -> bool:
    """Whether it does, while somebody waits."""
    return bool(select.select([process], [], [], 20)[0])


def test_how_a_rank_ends_is_told(slot: SlotProcess) -> None:
    slot.start()
    slot.tell("close")
    assert slot.tell("told") == "7"
    slot.start()
    slot.tell("kill")
    assert slot.tell("told") == slot.tell("told") == str(-signal.SIGKILL)  # whoever asks
    os.kill(slot.start(), signal.SIGTERM)
    assert slot.tell("told") == str(-signal.SIGTERM)


def test_a_rank_that_is_forgotten_ends_and_others_go_on(slot: SlotProcess) -> None:
    forgotten = os.pidfd_open(slot.start())
    slot.tell("forget")
    assert ends(forgotten)
    slot.start()
    slot.tell("close")
    assert slot.tell("told") == "7"


def test_ranks_end_with_their_slot_and_with_the_nursery(slot: SlotProcess) -> None:
    pid = slot.start()
    rank = os.pidfd_open(pid)
    nursery = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    gone = os.pidfd_open(nursery)
    os.kill(nursery, signal.SIGKILL)
    assert ends(gone)
    assert ends(rank)
    assert slot.tell("told") == str(-signal.SIGKILL)


def test_nothing_outlives_a_slot_that_is_killed(slot: SlotProcess) -> None:
    pid = slot.start()
    rank = os.pidfd_open(pid)
    nursery = os.pidfd_open(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))
    slot.process.kill()
    assert ends(nursery)
    assert ends(rank)
