"""What a forked child does first and last: it ends when its parent does, and leaves without what the parent had meant to do at its own end.

Used by the launcher, the nursery and the children of both.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """However the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Run it as all that this process still does: its exit code is this one's, whatever it raises is told."""
    code = 1
    try:
        code = main() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  the last line of defence of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()  # _exit drops what is buffered
        sys.stderr.flush()
        os._exit(code)
