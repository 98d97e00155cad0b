"""The calibration's file: only of this release and of this model."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.calibration import CALIBRATION_VERSION, Calibration, fingerprint
from strata_planner.contract.values import ContractError

CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}}


def a_file(folder: Path, version: int = CALIBRATION_VERSION) -> Path:
    path = folder / "strata-sensitivity.json"
    path.write_bytes(Calibration(version, fingerprint(CONFIG), "text.txt", 64, ()).encode())
    return path


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    found = Calibration.from_file(a_file(tmp_path), CONFIG)
    assert (found.text, found.tokens, found.layers) == ("text.txt", 64, ())


def test_how_a_model_was_saved_does_not_matter(tmp_path: Path) -> None:
    saved_again = {"transformers_version": "9.9", **CONFIG, "use_cache": False, "dtype": "float16"}
    Calibration.from_file(a_file(tmp_path), saved_again)


@given(st.sampled_from(["hidden_size", "rope_parameters", "model_type"]), st.integers(0, 9))
def test_any_other_field_makes_another_model(field: str, value: int) -> None:
    assert fingerprint(CONFIG | {field: value}) != fingerprint(CONFIG)


WRONG = {
    "another model": (lambda path: path, {"hidden_size": 128}, "is of another model .* calibrate this model"),
    "another release": (lambda path: a_file(path.parent, version=0), {}, "has version 0; this release reads version 1"),
    "no JSON": (lambda path: path.write_text("half a fi"), {}, "is no JSON object: calibrate again"),
    "a list": (lambda path: path.write_text("[]"), {}, "is no JSON object"),
    "absent": (lambda path: path.unlink(), {}, "cannot be read"),
}


@pytest.mark.parametrize(("spoil", "changes", "says"), WRONG.values(), ids=WRONG)
def test_a_file_that_does_not_belong(tmp_path: Path, spoil: Any, changes: dict[str, Any], says: str) -> None:
    path = a_file(tmp_path)
    spoil(path)
    with pytest.raises(ContractError, match=says):
        Calibration.from_file(path, CONFIG | changes)
