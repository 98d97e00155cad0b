"""The launcher: starts the local processes of a deployment from one parent that has imported torch already.

Started by `strata up`. Importing torch and transformers takes seconds and hundreds of megabytes in every process; forked
children share both. The parent runs no tensor operation: a child of one that has would hang in its thread pool.

Lines of JSON on stdin and stdout:

    -> {"id": "a", "module": "strata_runtime.slot.__main__", "arguments": ["--name", "a", ...], "log": "/path"}
    <- {"id": "a", "pid": 123}          and, when that process ends,          {"pid": 123, "exit": -9}

The end of stdin ends every child.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata_planner.contract.phases import Phase
from strata_runtime.collector import freeze_imports
from strata_runtime.file_pages import drop_file_pages
from strata_runtime.slot.forked import end_with, exit_with

PRELOADED = (
    "transformers",  # which needs no torch yet, and reads files while that is linked
    "strata_runtime.slot.__main__",
    "transformers.models.llama.modeling_llama",
)
END_PATIENCE_SECONDS = 3.0


def main(modules: Sequence[str] = ()) -> int:
    """`modules`: what its children find imported; by default what slots need. A gateway imports the rest of its own while slots load."""
    begun = time.perf_counter()
    gc.disable()  # until all is imported: what stays would be gone through again and again, a quarter of the start
    linking = threading.Thread(target=_link_torch)
    if not modules:
        linking.start()
    for name in modules or PRELOADED:
        importlib.import_module(name)
    if not modules:
        linking.join()  # children have this thread alone
    freeze_imports()  # and a collection in a child would write to every object of the parent, and so copy its pages
    gc.enable()
    drop_file_pages()  # children map the files anew and read what they need
    sys.stderr.write(f"{Phase('imports', time.perf_counter() - begun)}\n")
    wakeup, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.set_wakeup_fd(bell)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _say({"ready": True})
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap(children)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            _start(json.loads(line), children)
    _end(children)
    return 0


def _link_torch() -> None:
    """A third of torch's import is spent in the constructors of its libraries: without the interpreter's lock, beside other imports."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        with contextlib.suppress(OSError):  # who imports torch says what is wrong with it
            ctypes.CDLL(str(Path(folder) / "lib" / "libtorch_python.so"))


def _start(request: dict[str, Any], children: set[int]) -> None:
    pid = _fork(request)
    children.add(pid)
    _say({"id": request["id"], "pid": pid})


def _reap(children: set[int]) -> None:
    """Tell of every child that has ended."""
    for pid in tuple(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            _say({"pid": pid, "exit": os.waitstatus_to_exitcode(status)})


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone: its children end all the same
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def _fork(request: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        exit_with(lambda: _become(request, parent))
    return pid


def _become(request: dict[str, Any], parent: int) -> int:
    """The child: its own log for output, an end with the parent's, then the module's `main`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with(parent)
    os.setpgid(0, 0)  # Ctrl-C is the supervisor's to hear: it ends its children in order
    _redirect(request["log"])
    os.environ.update(request.get("environment", {}))
    code: int = importlib.import_module(request["module"]).main(request["arguments"])
    return code


def _redirect(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def _end(children: set[int]) -> None:
    """SIGTERM to all, SIGKILL to those that are still there after a while."""
    _signal(children, signal.SIGTERM)
    deadline = time.monotonic() + END_PATIENCE_SECONDS
    while children and time.monotonic() < deadline:
        time.sleep(0.02)
        _reap(children)
    _signal(children, signal.SIGKILL)
    while children:
        time.sleep(0.02)
        _reap(children)


def _signal(children: set[int], number: signal.Signals) -> None:
    for pid in children:  # not reaped yet, so the id is still that child's
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
