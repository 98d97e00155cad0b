"""`python -m strata_runtime.tools.quantize`: what it prints, where it writes, what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest

from strata_runtime.loading.artefact import find_artefact
from strata_runtime.tools.quantize import __main__ as command
from strata_runtime.tools.quantize.__main__ import main
from tests.runtime.architectures import make_tiny_model

EXAMPLE = Path(__file__).parents[4] / "examples" / "models" / "strata-tiny"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model that has the example's tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=2, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, folder)
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    answer: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return answer


@pytest.mark.parametrize(("more", "refitted"), [([], [3, 4, 5]), (["--no-refit"], []), (["--bits", "3"], [3])])
def test_a_copy_is_made_beside_the_model_and_verified(
    more: list[str], refitted: list[int], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = model / "text.txt"
    text.write_text("Whoever reads this counts as a calibration. " * 20)
    assert main([str(model), "--text", str(text), "--window", "32", "--tokens", "64", *more]) == 0
    made = told(capsys)
    assert made["refitted"] == refitted
    assert made["folder"] == str(model / "strata-any")
    assert made["calibration_tokens"] == 64
    assert len(made["layers"]) == 2  # type: ignore[arg-type]
    assert main([str(model), "--verify"]) == 0
    assert told(capsys)["verified_layers"] == 2


def test_a_read_only_model_has_its_copy_in_the_nodes_cache(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command.os.access
    monkeypatch.setattr(command.os, "access", lambda path, mode: path != model and real(path, mode))
    assert main([str(model)]) == 0
    artefact = find_artefact(model)
    assert artefact is not None
    assert artefact.folder.parent == tmp_path / "cache" / "strata" / "quantized"
    assert told(capsys)["folder"] == str(artefact.folder)


def test_another_place_can_be_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--bits", "4", "--output", str(tmp_path / "there")]) == 0
    assert told(capsys)["folder"] == str(tmp_path / "there")
    assert main([str(model), "--output", str(tmp_path / "there"), "--verify"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--verify"], "has no any-precision copy: run `strata quantize"),
        (["--verify", "--output", "{model}"], "has no manifest.json: it is no any-precision copy"),
        (["--text", "{model}/absent.txt"], "absent.txt: .*name a UTF-8 file"),
        (["--output", "{model}/config.json/x"], "cannot be made .*name another place with --output"),
    ],
    ids=["nothing to verify", "no copy there", "no text", "no folder"],
)
def test_wrong_input_is_said(
    arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model), *(each.format(model=model) for each in arguments)]) == 2
    assert re.search(f"^error: .*{message}", capsys.readouterr().err.replace("\n", " "))


def test_a_damaged_copy_is_said_by_verify(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model)]) == 0
    victim = model / "strata-any" / "any-00000.safetensors"
    victim.write_bytes(victim.read_bytes()[:-2] + b"##")
    assert main([str(model), "--verify"]) == 2
    assert "any-00000.safetensors has the checksum" in capsys.readouterr().err
