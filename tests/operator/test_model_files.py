"""Where config.json comes from, and what is said where it does not."""

import json
from pathlib import Path

import pytest

from strata_operator.errors import InvalidInputError
from strata_operator.observe.model_files import read_config


def test_a_claim_is_read_where_the_operator_mounts_it(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    environment = {"STRATA_MODELS_DIRECTORY": str(tmp_path)}
    assert read_config("pvc://models/llama", environment) == {"model_type": "llama"}


def test_a_claim_that_is_not_mounted_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"mount the claim models .* in the operator too"):
        read_config("pvc://models/llama", {"STRATA_MODELS_DIRECTORY": str(tmp_path)})


@pytest.mark.parametrize(("content", "says"), [("{", "not valid JSON"), ("[]", "must hold an object")])
def test_a_config_that_does_not_read_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInputError, match=says):
        read_config(f"file://{tmp_path}", {})
