"""The plans of the paper's clusters that the benchmark publishes, and the rows it publishes them in."""

import pytest

from benchmarks.plan_clusters import LISTED, OTHERS, measure
from benchmarks.rows import Row, with_absent
from strata_planner.cluster import Cluster

QUICK = [each for each in (*LISTED, *OTHERS) if each.number in {1, 3, 10}]


def test_every_cluster_of_the_paper_is_described() -> None:
    counts = {
        each.number: len(Cluster.from_yaml(each.file.read_text(encoding="utf-8")).accelerators())
        for each in (*LISTED, *OTHERS)
    }
    assert counts == {1: 1, 2: 1, 3: 4, 4: 4, 5: 6, 6: 4, 7: 8, 8: 6, 9: 4, 10: 4, 11: 4}


def test_clusters_are_planned() -> None:
    rows = measure(QUICK)
    assert [row.name for row in rows] == ["plan_cluster_3", "plan_cluster_1", "plan_cluster_10"]
    assert all(row.met and row.value for row in rows)


GOALS = {
    "reported": (Row("r", 1.0, "s"), True),
    "no value": (Row("r", None, "s"), False),
    "ratio reached": (Row("r", 1.0, "s", ratio=2.0, goal=1.6), True),
    "ratio missed": (Row("r", 9.0, "s", ratio=1.5, goal=1.6), False),
    "value below": (Row("r", 0.04, "share", goal=0.05, lower_is_better=True), True),
    "value above": (Row("r", 0.06, "share", goal=0.05, lower_is_better=True), False),
}


@pytest.mark.parametrize(("row", "met"), GOALS.values(), ids=GOALS)
def test_goals(row: Row, *, met: bool) -> None:
    assert row.met is met
    assert row.as_json()["met"] is met


def test_a_listed_row_that_is_absent_is_not_met() -> None:
    rows = with_absent([Row("a", 1.0, "s")], ("a", "b"))
    assert [(row.name, row.met) for row in rows] == [("a", True), ("b", False)]
