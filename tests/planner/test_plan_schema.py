"""docs/plan.schema.json is what the Plan type says, and plans follow it."""

import json
from pathlib import Path

import jsonschema

from strata_planner.contract.plan import MicroBatch
from strata_planner.contract.schema import DEFAULT_FILE, schema_text
from strata_planner.contract.values import to_json
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_request


def test_the_published_schema_is_current() -> None:
    assert Path(DEFAULT_FILE).read_text(encoding="utf-8") == schema_text(), "run `make generate`"


def test_a_plan_follows_the_schema() -> None:
    jsonschema.validate(json.loads(make_plan(a_request()).plan.encode()), json.loads(schema_text()))


def test_as_many_micro_batches_as_stages_unless_the_plan_says_fewer() -> None:
    one_per_stage, two = MicroBatch(1, 4, 64), MicroBatch(1, 4, 64, count=2)
    assert [one_per_stage.under_way(stages) for stages in (1, 4)] == [1, 4]
    assert [two.under_way(stages) for stages in (1, 4)] == [1, 2]
    assert b"count" not in to_json(one_per_stage), "slots of older releases refuse what they do not know"
