"""Children that a signal leaves none of."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from strata_operator.local.children import SIGNALS, held_child
from strata_operator.local.run import Stopped, leave_on_signals

ENDLESS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of a command; hang-ups are ignored, as under nohup."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    leave_on_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_is_being_started_is_heard_behind(handlers: None, number: int) -> None:
    started = []

    def begin() -> subprocess.Popen[bytes]:
        signal.raise_signal(number)
        started.append(subprocess.Popen(ENDLESS))
        return started[0]

    with pytest.raises(Stopped) as stopped, held_child(begin):
        raise AssertionError("the block has begun")
    assert stopped.value.code == 128 + number
    assert started[0].returncode == -signal.SIGKILL


def test_it_ends_with_its_block_and_handlers_are_as_before(handlers: None) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with held_child(lambda: subprocess.Popen(ENDLESS)) as process:
        assert [signal.getsignal(each) for each in SIGNALS] == before
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError), held_child(lambda: subprocess.Popen(["/no/such/program"])):
        pass
    assert [signal.getsignal(each) for each in SIGNALS] == before
