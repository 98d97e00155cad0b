"""`strata up` with a control secret that a benchmark knows: `python -m benchmarks.known_up up -f FILE ...`, the secret in `$VARIABLE`.

The product tells the gateway's secret to its own processes alone; who attacks as its holder has to have chosen it.
"""

import os
from unittest import mock

from strata_operator import cli
from strata_operator.local import deployment

VARIABLE = "STRATA_BENCHMARK_CONTROL_SECRET"


def main() -> None:
    make, secret = deployment._make_services, os.environ.pop(VARIABLE)  # noqa: SLF001  there is no other way in
    with mock.patch.object(
        deployment, "_make_services", lambda plan, options, _: make(plan, options, control_secret=secret)
    ):
        cli.main()


if __name__ == "__main__":
    main()
