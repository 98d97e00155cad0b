"""The names that dashboards and alerts rest on are in the documents."""

from pathlib import Path

from prometheus_client import REGISTRY

import strata_operator.act.metrics  # noqa: F401  registers them
from strata_operator.decide.report import CHOSEN, RESUMED
from strata_operator.render.records import ORDERED

PAGE = (Path(__file__).parents[3] / "docs/kubernetes.md").read_text()


def test_every_metric_of_the_operator_is_documented() -> None:
    ours = [family for family in REGISTRY.collect() if family.name.startswith("strata_operator_")]
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in ours}
    assert len(names) > 5
    assert {name for name in names if f"`{name}`" not in PAGE} == set()


def test_every_event_of_its_own_is_documented() -> None:
    assert {reason for reason in (*CHOSEN.values(), RESUMED, ORDERED, "SlotHung") if f"`{reason}`" not in PAGE} == set()
