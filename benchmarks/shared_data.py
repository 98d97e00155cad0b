"""Where the benchmarks find data that others published: `--data DIR`, else the environment's STRATA_SHARED_DATA, else nowhere.

Used by the benchmarks that compare with published tables and traces; without the data each names the rows that it leaves out.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "STRATA_SHARED_DATA"


def data_folder(arguments: Sequence[str] | None = None) -> tuple[Path | None, list[str]]:
    """The folder, and the arguments that are left for `rows.run`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, metavar="DIR")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    given = os.environ.get(VARIABLE)
    return chosen.data or (Path(given) if given else None), rest
