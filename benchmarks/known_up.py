"""`strata up` with a control secret that a benchmark knows: `python -m benchmarks.known_up up -f FILE ...`, the secret in `$VARIABLE`.

The product tells the gateway's secret to its own processes alone; who attacks as its holder has to have chosen it.
"""

import os

from strata_operator import cli
from strata_operator.local import deployment

VARIABLE = "STRATA_BENCHMARK_CONTROL_SECRET"


def main() -> None:
    make, secret = deployment._make_services, os.environ.pop(VARIABLE)  # noqa: SLF001  there is no other way in
    deployment._make_services = lambda plan, options, _: make(plan, options, secret)  # noqa: SLF001
    cli.main()


if __name__ == "__main__":
    main()
