"""What the runtime tells of a model before it is loaded: the tokenizer's file may be wrong in any way, each is a sentence."""

import json
import shutil
from pathlib import Path

import pytest

from strata_runtime.gateway import preflight

EXAMPLE = Path(__file__).parents[3] / "examples/models/strata-tiny"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (EXAMPLE / name).is_file():
            shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def test_a_tokenizer_that_loads_is_no_problem(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main([f"file://{model}"]) == 0
    assert json.loads(capsys.readouterr().out) == {"problems": []}


WRONG = {"no JSON": '{"a":', "no tokenizer": "{}", "an impossible one": '{"model": {"type": "BPE", "vocab": 3}}'}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_tokenizer_that_does_not_load_is_told_with_its_folder(model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    (problem,) = preflight.problems(f"file://{model}")
    assert str(model) in problem


def test_a_folder_without_a_tokenizer_is_told(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    (problem,) = preflight.problems(f"file://{model}")
    assert "holds no tokenizer" in problem


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    (problem,) = preflight.problems(f"file://{tmp_path}")
    assert "has no config.json" in problem
