"""The parent of the processes that plan: `python -m strata_operator.act.plan_worker MEMORY_BYTES`, started by `plan_process`.

Its standard input is a socket; each channel that comes over it is one question's, answered by a fork: what the planner imports takes longer
than many a plan, and is imported once. A fork's memory is bounded, its processor time is nobody else's concern.
"""

import gc
import os
import resource
import signal
import socket
import sys
import traceback

from strata_operator.act.planner_call import Question, answer_to
from strata_planner.contract.values import from_json, to_json

_POLITE = 5  # the operator's own looks go first on a busy machine


def main() -> None:
    """Ends when whoever started it ends."""
    limit = int(sys.argv[1])
    os.nice(_POLITE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are gone when they end
    gc.freeze()  # what is imported stays shared with the forks
    with socket.socket(fileno=os.dup(0)) as orders:
        with open(os.devnull) as nothing:  # noqa: PTH123  a descriptor is all that is wanted
            os.dup2(nothing.fileno(), 0)
        while channels := socket.recv_fds(orders, 1, 1)[1]:
            with socket.socket(fileno=channels[0]) as channel:
                if os.fork() == 0:
                    orders.close()
                    _plan(channel, limit)


def _plan(channel: socket.socket, limit: int) -> None:
    """Never returns. Ends silently if nobody asks."""
    try:
        itself = os.pidfd_open(os.getpid())
        socket.send_fds(channel, [b"."], [itself])  # to be ended by
        os.close(itself)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with channel.makefile("rb") as file:
            asked = file.read()
        if asked:
            channel.sendall(to_json(answer_to(from_json(asked, Question))))
    except BaseException:  # noqa: BLE001  said in the log; whoever asked hears that there is no answer
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
