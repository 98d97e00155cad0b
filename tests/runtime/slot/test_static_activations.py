"""A plan whose layers round activations by calibrated scales: loaded with the model's calibration, refused by name without one."""

import shutil
from pathlib import Path

import pytest
import torch

from strata_planner.contract.frames import Segment
from strata_planner.contract.model_folder import ACTIVATIONS_FILE
from strata_runtime.formats.errors import NotCalibratedError
from strata_runtime.slot.chain import StageChain
from strata_runtime.tools.calibration.activation_calibration import Recipe, calibrate_activations
from tests.runtime.plans import even_plan

NAMES = ("s0", "s1", "s2")
TOKENS = {0: [5, 17, 3, 60, 22, 9, 41, 33, 8, 2, 71, 12, 90, 4, 66, 31, 7, 55, 29, 13]}
WHOLE = [Segment(0, 0, 20, 20)]


def logits(model: Path, name: str) -> torch.Tensor:
    plan = even_plan(model, NAMES, formats=[name] * 6)  # type: ignore[list-item]
    return StageChain.load(plan, model).logits(TOKENS, WHOLE)


@pytest.mark.slow  # formats/static8 has the products
def test_a_calibrated_model_answers_almost_as_it_does_at_16_bits(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    with pytest.raises(
        NotCalibratedError, match=f"there is no .*{ACTIVATIONS_FILE}: calibrate the model with python -m"
    ):
        logits(model, "w8a8_static")
    windows = [torch.tensor(TOKENS[0]), torch.arange(40) % 128]
    calibrate_activations(model, windows, Recipe("minmax", "search")).write(model / ACTIVATIONS_FILE)
    exact, static, dynamic = (logits(model, name) for name in ("dense", "w8a8_static", "w8a8"))
    assert (static - exact).norm() < 0.05 * exact.norm()
    assert (static - exact).norm() < 3 * (dynamic - exact).norm()


def test_a_calibration_of_other_weights_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    found = calibrate_activations(model, [torch.arange(20)], Recipe("minmax", None))
    found.write(model / ACTIVATIONS_FILE)
    config = model / "config.json"
    config.write_text(config.read_text().replace("256", "255"))
    with pytest.raises(NotCalibratedError, match="is of another model"):
        logits(model, "w8a8_static")
