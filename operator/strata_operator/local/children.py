"""Children that a signal leaves none of. Called by whatever starts a process for a while; knows none of them."""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def held_child(begin: Callable[[], subprocess.Popen[bytes]]) -> Iterator[subprocess.Popen[bytes]]:
    """What `begin` starts; it is killed with the block. A signal that comes meanwhile is heard right behind: what its handler raises in the midst of `Popen`
    would leave a process that nobody knows of, and that has come too late for the signal itself.
    """
    heard: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    # Python hears signals in its main thread alone; what is ignored, or ends this process at once, is the child's to inherit.
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {each: found for each in SIGNALS if is_main and callable(found := signal.getsignal(each))}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    with contextlib.ExitStack() as held:
        held.callback(restore)
        for number in handlers:
            signal.signal(number, hear)
        process = held.enter_context(begin())
        held.callback(process.kill)
        restore()
        for first in heard[:1]:
            signal.raise_signal(first)
        yield process
