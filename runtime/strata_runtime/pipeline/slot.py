"""Starts a slot under the name that every release's image has: `python -m strata_runtime.pipeline.slot --name S ...`.

Called by pods. A deployment keeps the image that it was made with when the operator is upgraded, and a pod that is started again
gets the command of the new operator.
"""

import sys

from strata_runtime.slot.__main__ import main, parse

__all__ = ["main", "parse"]

if __name__ == "__main__":
    sys.exit(main())
