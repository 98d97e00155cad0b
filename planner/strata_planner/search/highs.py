"""HiGHS by PuLP, on one core and without a word: standard output is the plan's (`strata plan --json`).

Called by the exact ILP, by the fleets' integer programme and by their bound.
"""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import highspy  # before pulp, whose own import of it would swallow a Ctrl-C that comes meanwhile
import pulp

_STDOUT = 1


def optimise(model: pulp.LpProblem, **options: float | str | None) -> None:
    """`options`: PuLP's `timeLimit` and `gapRel`, and HiGHS's own. Raises ValueError where HiGHS fails inside."""
    _introduced()
    model.solve(pulp.HiGHS(msg=False, threads=1, **options))


@cache
def _introduced() -> None:
    """The first solver of a process prints what HiGHS is when it is made, before anybody can tell it not to (1.16.0): to nobody."""
    try:
        told = os.dup(_STDOUT)
    except OSError:  # closed: nobody reads it
        return
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        with Path(os.devnull).open("wb") as nobody:
            os.dup2(nobody.fileno(), _STDOUT)
        highspy.Highs()
        ctypes.CDLL(None).fflush(None)  # it is written by C, which keeps it until then
    finally:
        os.dup2(told, _STDOUT)
        os.close(told)
