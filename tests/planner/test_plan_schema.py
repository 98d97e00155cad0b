"""docs/plan.schema.json is what the Plan type says, and plans follow it."""

import json
from pathlib import Path

import jsonschema

from strata_planner.contract.schema import DEFAULT_FILE, schema_text
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_request


def test_the_published_schema_is_current() -> None:
    assert Path(DEFAULT_FILE).read_text(encoding="utf-8") == schema_text(), "run `make generate`"


def test_a_plan_follows_the_schema() -> None:
    jsonschema.validate(json.loads(make_plan(a_request()).plan.encode()), json.loads(schema_text()))
