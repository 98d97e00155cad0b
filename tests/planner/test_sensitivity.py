"""The prior, tables from files, indicators from statistics, and the bound that a perplexity sets."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.calibration import (
    CALIBRATION_VERSION,
    Calibration,
    LayerStatistics,
    LinearStatistics,
    MeasuredLoss,
)
from strata_planner.errors import WorkloadError
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.sensitivity import (
    Sensitivity,
    check_shapes,
    penalty_bound,
    predicted_perplexity_increase,
    prior,
)
from strata_planner.sensitivity.fit import CurveName, LossFit, Point, fit_loss, leave_one_out
from strata_planner.sensitivity.indicators import INDICATORS, IndicatorName, step_square, variance
from tests.planner.builders import a_cluster, a_model, a_request, a_wide_model

LOSS = math.log(20.0)


def a_linear(**changes: object) -> LinearStatistics:
    """10 x 4 weights of -1..3, steps of the quantizers about half of that."""
    linear = LinearStatistics(
        name="mlp.up_proj",
        out_features=10,
        in_features=4,
        input_mean=0.5,
        input_variance=2.0,
        weight_min=-1.0,
        weight_max=3.0,
        group_range_square=4.0,
        channel_peak_square=2.25,
        deviation={"3": 0.04, "4": 0.01, "8": 0.0001},
    )
    return msgspec.structs.replace(linear, **changes)


def a_calibration(scales: Sequence[float] = (1.0, 2.0), measured: Sequence[MeasuredLoss] = ()) -> Calibration:
    """A layer per scale, with two linears each, whose deviations it multiplies."""
    base = a_linear().deviation
    layers = tuple(
        LayerStatistics((a_linear(deviation={bits: scale * each for bits, each in base.items()}), a_linear()))
        for scale in scales
    )
    return Calibration(
        version=CALIBRATION_VERSION,
        fingerprint="f" * 64,
        text="text.txt",
        tokens=64,
        layers=layers,
        held_back_tokens=64 if measured else 0,
        loss=LOSS if measured else None,
        measured=tuple(measured),
    )


def measured_with(slope: float) -> list[MeasuredLoss]:
    """Losses that grow with the deviation indicator in exact proportion."""
    table = Sensitivity.from_statistics(a_calibration())
    return [
        MeasuredLoss(bits, LOSS + slope * table.total(bits), slope * table.total(bits), 1e-9)
        for bits in ((8, 8), (4, 4), (3, 3), (3, 16), (16, 4))
    ]


def test_the_prior_counts_the_whole_model_at_8_bits_as_one() -> None:
    model = a_model()
    table = prior(model, (3, 4, 8, 16))
    assert sum(table.of(layer, 8) for layer in range(6)) == pytest.approx(1)
    assert table.of(0, 4) == pytest.approx(256 * table.of(0, 8))
    assert table.of(0, 3) == pytest.approx(4 * table.of(0, 4))


def test_a_table_decides_which_layers_lose_bits(tmp_path: Path) -> None:
    """Layers 1 and 4 do not mind 8 bits, the others do."""
    omega = tuple({"8": 0.01 if index in {1, 4} else 5.0} for index in range(6))
    file = tmp_path / "omega.json"
    file.write_text(Sensitivity("calibrated", omega).to_json())
    request = a_request(
        a_cluster(330, 330),
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


STEPS = {
    "3 bits, mean over groups": (3, "stored", 4.0 / 49),
    "4 bits, mean over groups": (4, "stored", 4.0 / 225),
    "8 bits, mean over outputs": (8, "stored", 2.25 / 127**2),
    "one asymmetric step": (4, "asymmetric", (4.0 / 15) ** 2),
    "one symmetric step": (4, "symmetric", (3.0 / 7) ** 2),
}


@pytest.mark.parametrize(("bits", "steps", "expected"), STEPS.values(), ids=STEPS)
def test_steps_of_a_quantizer(bits: int, steps: str, expected: float) -> None:
    assert step_square(a_linear(), bits, steps) == pytest.approx(expected)  # type: ignore[arg-type]


def test_the_variance_indicator_is_proposition_2() -> None:
    linear, step = a_linear(), 4.0 / 225
    assert variance(linear, 4, "deterministic") == pytest.approx(40 * step * 2.0 / 4)
    assert variance(linear, 4, "stochastic") == pytest.approx(40 * step * (0.25 + 2.0) / 6)


@pytest.mark.parametrize("indicator", INDICATORS)
def test_omega_falls_with_bits_and_the_whole_model_at_8_bits_is_one(indicator: IndicatorName) -> None:
    table = Sensitivity.from_statistics(a_calibration(), indicator)
    assert table.total((8, 8)) == pytest.approx(1)
    assert table.total((3, 3)) > table.total((4, 4)) > table.total((8, 8)) > table.total((16, 16)) == 0
    assert indicator in table.source
    assert "text.txt" in table.source


def test_deviation_tells_layers_apart_that_look_alike_from_their_weights() -> None:
    table = Sensitivity.from_statistics(a_calibration())
    assert table.of(1, 4) / table.of(0, 4) == pytest.approx(3 / 2)
    alike = Sensitivity.from_statistics(a_calibration(), "deterministic")
    assert alike.of(1, 4) == pytest.approx(alike.of(0, 4))


def test_a_calibration_of_other_shapes_is_refused() -> None:
    with pytest.raises(WorkloadError, match="2 layers where the model has 6"):
        check_shapes(a_calibration(), a_model(hidden_size=4, num_attention_heads=1, num_key_value_heads=1))
    with pytest.raises(WorkloadError, match="80 parameters in the linears of layer 0 where the model has"):
        check_shapes(a_calibration([1.0] * 6), a_model())


def test_the_bound_allows_what_the_prediction_says() -> None:
    table = Sensitivity.from_statistics(a_calibration(measured=measured_with(1e-4)))
    assert table.fit is not None
    assert table.fit.curve == "proportional"
    assert table.fit.leave_one_out == pytest.approx(0, abs=1e-6)
    allowed = penalty_bound(table, predicted_perplexity_increase(table, (4, 4)))
    assert allowed == pytest.approx(table.total((4, 4)))
    expected = 20.0 * math.expm1(1e-4 * table.total((3, 3)))
    assert predicted_perplexity_increase(table, (3, 3)) == pytest.approx(expected)


NO_BOUND = {
    "the prior": (prior(a_model(), (4, 8)), 0.1, "strata sensitivity"),
    "no losses measured": (Sensitivity.from_statistics(a_calibration()), 0.1, "no losses of this model were measured"),
    "nothing allowed": (Sensitivity.from_statistics(a_calibration()), 0.0, "above 0 is needed"),
}


@pytest.mark.parametrize(("table", "increase", "says"), NO_BOUND.values(), ids=NO_BOUND)
def test_a_bound_that_cannot_be_kept(table: Sensitivity, increase: float, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        penalty_bound(table, increase)


def test_losses_within_their_noise_make_no_curve() -> None:
    assert fit_loss(LOSS, [(1.0, 0.001, 0.01), (2.0, -0.004, 0.01)]) is None


def test_the_curve_that_predicts_best_is_kept() -> None:
    power = [(x, 0.01 * x**0.5, 1e-9) for x in (1.0, 3.0, 10.0, 30.0, 100.0)]
    fitted = fit_loss(LOSS, power)
    assert fitted is not None
    assert (fitted.curve, fitted.points) == ("power", 5)
    assert fitted.exponent == pytest.approx(0.5)
    assert leave_one_out(LOSS, "power", power) == fitted.leave_one_out < leave_one_out(LOSS, "proportional", power)


POINTS = st.lists(
    st.tuples(st.floats(0.01, 1e4), st.floats(1e-6, 2.0), st.just(1e-9)),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each[0],
)
CURVES = st.sampled_from(["proportional", "power", "isotonic"])


@given(points=POINTS, curve=CURVES, asked=st.lists(st.floats(0, 1e5), min_size=2, max_size=6))
def test_curves_rise_from_the_origin(points: list[Point], curve: CurveName, asked: list[float]) -> None:
    fitted = LossFit.through(LOSS, curve, points)
    found = [fitted.increase(omega) for omega in sorted(asked)]
    assert fitted.increase(0.0) == 0
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(found))


@given(points=POINTS, curve=CURVES, increase=st.floats(1e-6, 1.0))
def test_the_largest_omega_turns_the_curve_round(points: list[Point], curve: CurveName, increase: float) -> None:
    fitted = LossFit.through(LOSS, curve, points)
    omega = fitted.largest_omega(increase)
    assert fitted.increase(omega) == pytest.approx(increase, rel=1e-6)
