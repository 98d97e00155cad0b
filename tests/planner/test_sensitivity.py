"""The prior and tables from files."""

from pathlib import Path

import pytest

from strata_planner.errors import WorkloadError
from strata_planner.planning import make_plan
from strata_planner.sensitivity import Sensitivity, prior
from strata_planner.workload import Workload
from tests.planner.builders import a_cluster, a_model, a_request, a_wide_model


def test_the_prior_counts_the_whole_model_at_8_bits_as_one() -> None:
    model = a_model()
    table = prior(model, (3, 4, 8, 16))
    assert sum(table.of(layer, 8) for layer in range(6)) == pytest.approx(1)
    assert table.of(0, 4) == pytest.approx(256 * table.of(0, 8))
    assert table.of(0, 3) == pytest.approx(4 * table.of(0, 4))


def test_a_table_decides_which_layers_lose_bits(tmp_path: Path) -> None:
    """Layers 1 and 4 do not mind 8 bits; with room for four layers at 16 they are the ones."""
    omega = tuple({"8": 0.01 if index in {1, 4} else 5.0} for index in range(6))
    file = tmp_path / "omega.json"
    file.write_text(Sensitivity("calibrated", omega).to_json())
    request = a_request(
        a_cluster(300, 300),
        model=a_wide_model(),
        sensitivity=Sensitivity.from_file(file),
        allowed_bits=(8, 16),
        workload=Workload(16, 16, 2),
        theta=100.0,
    )
    plan = make_plan(request).plan
    bits = [each for stage in plan.replicas[0].stages for each in stage.bits]
    assert bits == [16, 8, 16, 16, 8, 16]
    assert plan.prediction.sensitivity_source == "calibrated"


def test_an_unreadable_table(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read"):
        Sensitivity.from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(WorkloadError, match="missing required field"):
        Sensitivity.from_file(tmp_path / "bad.json")
