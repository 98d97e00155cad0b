"""Standing orders with the real runtime: the controller of three slots is stopped, then a slot is killed under a client's stream."""

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_operator.local.ports import free_port
from tests.operator.local.streaming import stream
from tests.operator.local.test_up_end_to_end import make_model

# Five processes, and a silence that is to be waited for: tests/chain/test_standing_orders.py has the same by virtual time.
pytestmark = pytest.mark.slow
KILL_AFTER = 20


class Supervised:
    """The controller's process, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port("127.0.0.1")
        command = [sys.executable, "-m", "tests.operator.local.supervised", str(folder), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pids: dict[str, int] = {}
        self._said = ""
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._more:
                self._said += line
                if found := re.search(r"(\S+) runs as process (\d+)", line):
                    self.pids[found[1]] = int(found[2])
                self._more.notify_all()

    def says(self, *words: str) -> None:
        """Once it has said all of that, in any order, since it was last asked."""
        with self._more:
            assert self._more.wait_for(lambda: all(each in self._said for each in words), 60), self._said
            self._said = ""

    def stream(self) -> Iterator[str]:
        return stream(self.port, [5, 9, 2], "tiny", max_tokens=200)

    def orders_carried_out(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            found = re.findall(r"^strata_standing_orders_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
        return sum(map(float, found))

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(30)
        self._reader.join()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model")
    started = Supervised(tmp_path)
    yield started
    started.close()


def until_logged(file: Path, words: str) -> None:
    """As processes that nobody listens to say it."""
    following = subprocess.Popen(["tail", "-n", "+1", "-F", str(file)], stdout=subprocess.PIPE, text=True)
    try:
        assert following.stdout
        assert any(words in line for line in following.stdout)
        following.stdout.close()
    finally:
        following.kill()
        following.wait()


@pytest.mark.parametrize("victim", ["tiny-a-cpu", "tiny-b-cpu"])
def test_a_stream_goes_on_when_a_slot_is_lost_while_nobody_controls(supervised: Supervised, victim: str) -> None:
    """The leader, or a stage behind it. Who controls again finds what was done, and makes the plan whole."""
    supervised.says("ready", "standing orders for epoch 1")
    expected = "".join(supervised.stream())
    supervised.process.send_signal(signal.SIGSTOP)
    until_logged(supervised.folder / "gateway.log", "no controller was heard")
    pieces = []
    for piece in supervised.stream():
        pieces.append(piece)
        if len(pieces) == KILL_AFTER:
            os.kill(supervised.pids[victim], signal.SIGKILL)
    assert "".join(pieces) == expected
    assert supervised.orders_carried_out() == 1
    supervised.process.send_signal(signal.SIGCONT)
    supervised.says(
        f"was made by a standing order while nobody controlled the deployment: {victim} was lost", "ready in"
    )
    assert "".join(supervised.stream()) == expected
