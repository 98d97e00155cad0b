"""The nursery: the process that a slot's other ranks are forked from. It has imported all that they need, so that they share it, and computes nothing.

A slot that may have ranks forks it at its start (`open_at_start`), before it has threads, sockets or kernels of its own: what the slot itself has
imported is shared too. Where nobody did, the first rank starts one as a fresh process (`the_nursery`). Used by `slot.other_ranks`.
It ends with its slot, and its ranks with it. Linux alone, as the ranks' segment is.
"""

import atexit
import contextlib
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from strata_runtime.collector import freeze_imports
from strata_runtime.file_pages import drop_file_pages
from strata_runtime.slot.forked import end_with, exit_with

RANK = "strata_runtime.slot.rank_process"
PRELOADED = (RANK, "transformers.models.llama.modeling_llama")  # what every architecture shares comes with the latter
_LONGEST = 4096  # bytes of a rank's arguments
_ASKED_FDS = 3  # its socket, its segment, its life


class RankHandle:
    """A rank's process as its slot has it, a child of the nursery. It is ended when this is forgotten."""

    def __init__(self, life: socket.socket) -> None:
        """life: what the nursery tells of it. Raises OSError where the nursery has ended."""
        self._life = life
        told = life.recv(_LONGEST)
        if not told:
            raise BrokenPipeError("the process that ranks are forked from has ended")
        self.pid = int(told)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal, as `subprocess` has it. Several threads may wait. Raises TimeoutError."""
        ready, _, _ = select.select([self._life], [], [], timeout)
        if not ready:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout:g} s")
        told = self._life.recv(_LONGEST, socket.MSG_PEEK)
        return int(told) if told else -signal.SIGKILL  # the nursery has ended, and took it along

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self._life], [], [], 0)[0])

    def kill(self) -> None:
        """By the nursery, which knows whether the process still has its id."""
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def __del__(self) -> None:
        self._life.close()


class Nursery:
    """The slot's end of it; any thread may start ranks. `wait`: for the end of its process."""

    def __init__(self, control: socket.socket, wait: Callable[[], object]) -> None:
        self._control = control
        self._wait = wait
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str], connection: int, segment: int, *, fresh: bool = False) -> RankHandle:
        """`python -m ...rank_process` with the descriptors of its socket and its segment, which may be closed afterwards. `fresh`: as a program of its own that
        shares no imports, as CUDA wants it. Raises OSError where it has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            asked = json.dumps([fresh, list(arguments)]).encode()
            socket.send_fds(self._control, [asked], [connection, segment, theirs.fileno()])
        return RankHandle(ours)

    def close(self) -> None:
        """It ends, and all of its ranks."""
        self._control.close()
        self._wait()


_lock = threading.Lock()
_opened: list[Nursery] = []  # one at most: the process' own


def open_at_start() -> None:
    """Forks the nursery from this process, which must have no thread but this one, and must not have computed anything: a thread pool's locks
    would be copied as they are, without the threads that open them.
    """
    _import_all()
    freeze_imports()
    ours, theirs = _pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        exit_with(lambda: _serve(theirs))
    _check_alone()
    theirs.close()
    _opened[:] = [Nursery(ours, lambda: os.waitpid(pid, 0))]


def the_nursery(ended: Nursery | None = None) -> Nursery:
    """This process' nursery; not the one that was found to have ended."""
    with _lock:
        if ended in _opened:
            _opened.pop().close()
        if not _opened:
            _opened.append(_spawned())
        return _opened[0]


def _spawned() -> Nursery:
    ours, theirs = _pair()
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)  # noqa: S603  our own module
    nursery = Nursery(ours, process.wait)
    atexit.register(nursery.close)
    return nursery


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # messages stay apart


def _import_all() -> None:
    for name in PRELOADED:
        importlib.import_module(name)


def _serve(control: socket.socket) -> None:
    """Until the slot's end of the socket is closed: forks what it asks for, tells of ends, ends whom nobody wants any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the slot's to hear
    wakeup, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.set_wakeup_fd(bell)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lives: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as waiting:
        waiting.register(control, selectors.EVENT_READ)
        waiting.register(wakeup, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in waiting.select()]
            if wakeup in ready:
                os.read(wakeup, _LONGEST)
                _reap(lives, waiting)
            if control in ready:
                asked, descriptors, _, _ = socket.recv_fds(control, _LONGEST, _ASKED_FDS)
                if not asked:
                    break  # the kernel ends its children with it
                pid = _fork(
                    json.loads(asked), descriptors, [control.fileno(), waiting.fileno(), wakeup, bell, *lives.values()]
                )
                lives[pid] = life = socket.socket(fileno=descriptors[2])
                waiting.register(life, selectors.EVENT_READ)
                for descriptor in descriptors[:2]:
                    os.close(descriptor)
                _tell(life, pid)
            for pid, life in lives.items():
                if life in ready and life in waiting.get_map():
                    waiting.unregister(life)
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still that child's


def _reap(lives: dict[int, socket.socket], waiting: selectors.BaseSelector) -> None:
    for pid, life in tuple(lives.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del lives[pid]
            if life in waiting.get_map():
                waiting.unregister(life)
            _tell(life, os.waitstatus_to_exitcode(status))
            life.close()


def _tell(life: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who wanted to know is gone
        life.send(str(number).encode())


def _fork(asked: tuple[bool, list[str]], descriptors: list[int], others: Sequence["int | socket.socket"]) -> int:
    """others: what the rank has no use for."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        exit_with(lambda: _become(asked, descriptors, others, parent))
    _check_alone()
    return pid


def _check_alone() -> None:
    """Asked after a fork: OpenBLAS, which numpy starts threads of, ends them for one by itself."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a process of {threads} threads was forked: what locks they held, nobody opens in the child"


def _become(
    asked: tuple[bool, list[str]], descriptors: list[int], others: Sequence["int | socket.socket"], parent: int
) -> int:
    fresh, arguments = asked
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with(parent)
    for each in (*others, descriptors[2]):
        os.close(each if isinstance(each, int) else each.fileno())
    own = ["--socket", str(descriptors[0]), "--segment", str(descriptors[1])]
    if fresh:
        for each in descriptors[:2]:
            os.set_inheritable(each, True)
        os.execv(sys.executable, [sys.executable, "-m", RANK, *own, *arguments])  # noqa: S606  our own module
    code: int = importlib.import_module(RANK).main([*own, *arguments])
    return code


def main(arguments: Sequence[str]) -> None:
    _import_all()
    freeze_imports()
    drop_file_pages()
    control = socket.socket(fileno=int(arguments[0]))
    exit_with(lambda: _serve(control))


if __name__ == "__main__":
    main(sys.argv[1:])
