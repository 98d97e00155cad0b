"""The plans of the paper's clusters that the benchmark publishes, and the rows it publishes them in."""

import pytest

from benchmarks.plan_clusters import EXAMPLES, LISTED, OTHERS, measure
from benchmarks.planner import CLUSTERS, asked, plan
from benchmarks.rows import Row, with_absent
from benchmarks.seeded_omegas import LAYERS, file_of, seeded
from strata_planner.question.cluster import Cluster
from strata_planner.sensitivity import Sensitivity
from tests.laws import swept

QUICK = [each for each in (*LISTED, *OTHERS) if each.number in {1, 3, 10}]


def test_every_cluster_of_the_paper_is_described() -> None:
    counts = {
        each.number: len(Cluster.from_yaml(each.file.read_text(encoding="utf-8")).accelerators())
        for each in (*LISTED, *OTHERS)
    }
    assert counts == {1: 1, 2: 1, 3: 4, 4: 4, 5: 6, 6: 4, 7: 8, 8: 6, 9: 4, 10: 4, 11: 4}


@pytest.mark.slow
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


def test_the_seeded_sensitivities_are_those_that_are_committed() -> None:
    for model, layers in LAYERS.items():
        table = Sensitivity.from_file(file_of(model))
        assert table == seeded(layers)
        assert sum(row["4"] for row in table.omega) == pytest.approx(1.0, rel=1e-4)
        assert len({row["4"] for row in table.omega}) == layers


@pytest.mark.parametrize("number", swept([3, 9], [9]))
def test_unlike_layers_are_planned_and_judged(number: int) -> None:
    """With the gap proven, and priced alike by the judge (the benchmark's `plan` asserts it)."""
    cluster = next(each for each in CLUSTERS if each.number == number)
    planned = plan(cluster, asked(cluster, 10.0), repeats=1)
    assert planned.outcome.stats.gap < 1e-5
    assert planned.request.theta * planned.outcome.plan.prediction.quality_penalty > 0


def test_every_cluster_has_a_deployment_of_its_model() -> None:
    for each in CLUSTERS:
        text = (EXAMPLES / f"llm-pq-{each.number}.yaml").read_text(encoding="utf-8")
        assert f"uri: file:///models/{each.model}\n" in text
        assert f"--cluster examples/clusters/llm-pq-{each.number}.yaml" in text
