"""One plan, in a process of its own: `python -m strata_operator.act.plan_worker MEMORY_BYTES`, started by `planners`.

Reads one question from its standard input, writes one answer to its standard output, and ends. It is started before there is
a question, so that its imports cost no plan any time. Its memory is bounded, its processor time is nobody else's concern.
"""

import os
import resource
import sys

from strata_operator.act.planner_call import Question, answer_to
from strata_planner.contract.values import from_json, to_json

_POLITE = 5  # the operator's own looks go first on a busy machine


def main() -> None:
    """Ends silently if whoever started it ends first."""
    limit = int(sys.argv[1])
    os.nice(_POLITE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    asked = sys.stdin.buffer.read()
    if asked:
        sys.stdout.buffer.write(to_json(answer_to(from_json(asked, Question))))


if __name__ == "__main__":
    main()
