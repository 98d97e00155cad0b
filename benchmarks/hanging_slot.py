"""A slot whose steps can be made to hang: its `main` is the real one's, and its next forward never ends once the process gets SIGUSR1 or SIGUSR2.

Started by `strata up` in place of the slot (`benchmarks.kills`). After SIGUSR1 one thread waits for ever, as for a kernel that is stuck, and all others go on; after
SIGUSR2 it keeps the interpreter's lock meanwhile, so that only what is no Python goes on: libzmq's heartbeats.
"""

import ctypes
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from strata_runtime.loading.stage_model import StageModel
from strata_runtime.slot import __main__ as slot

WAITS, KEEPS_THE_LOCK = signal.SIGUSR1, signal.SIGUSR2


def main(arguments: Sequence[str] | None = None) -> int:
    asked: list[int] = []
    forward: Callable[..., Any] = StageModel.forward

    def hanging(*given: Any, **named: Any) -> Any:
        if asked:
            _hang(asked[0])
        return forward(*given, **named)

    StageModel.forward = hanging  # type: ignore[method-assign]
    for number in (WAITS, KEEPS_THE_LOCK):
        signal.signal(number, lambda got, _: asked.append(got))
    return slot.main(arguments)


def _hang(how: int) -> None:
    if how == KEEPS_THE_LOCK:
        library = ctypes.PyDLL(None)  # calls into it keep the lock
        while True:
            library.sleep(3600)
    threading.Event().wait()
