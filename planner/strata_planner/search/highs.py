"""HiGHS by PuLP, on one core and without a word: standard output is the plan's (`strata plan --json`).

Called by the exact ILP, by the fleets' integer programme and by their bound.
"""

import highspy  # noqa: F401  before pulp, whose own import of it would swallow a Ctrl-C that comes meanwhile
import pulp


def optimise(model: pulp.LpProblem, **options: float | str | None) -> None:
    """`options`: PuLP's `timeLimit` and `gapRel`, and HiGHS's own. Raises ValueError where HiGHS fails inside.

    `msg` alone does not keep the programmes that HiGHS solves inside from printing who they are.
    """
    model.solve(pulp.HiGHS(msg=False, log_to_console=False, threads=1, **options))
