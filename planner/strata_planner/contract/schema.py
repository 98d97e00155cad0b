"""Writes docs/plan.schema.json from the Plan type: `python -m strata_planner.contract.schema [FILE]`, called by `make generate`."""

import json
import sys
from pathlib import Path

from strata_planner.contract.plan import plan_schema

DEFAULT_FILE = Path("docs/plan.schema.json")


def schema_text() -> str:
    return json.dumps(plan_schema(), indent=2) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(schema_text(), encoding="utf-8")
