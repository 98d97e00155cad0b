"""The pass over a whole model, and its command."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.calibration import CALIBRATION_FILE, Calibration
from strata_runtime.tools.calibration.__main__ import main
from strata_runtime.tools.calibration.calibrate import Subject, calibrate
from strata_runtime.tools.calibration.text import Windows
from tests.runtime.architectures import make_tiny_model

torch.set_num_threads(1)
TINY = Path(__file__).parents[4] / "examples" / "models" / "strata-tiny"
WINDOWS = Windows(
    (torch.arange(3, 35), torch.arange(40, 72)),
    (torch.arange(20, 52), torch.arange(4, 68, 2)),
)


@pytest.mark.slow
def test_statistics_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Inputs of every linear as transformers computes them, without our layers."""
    folder = make_tiny_model(tmp_path, "llama")
    done: list[tuple[int, int]] = []
    found = calibrate(Subject(folder, "text"), WINDOWS, lambda *each: done.append(each))
    assert done == [(index, 6) for index in range(1, 7)]
    assert (found.tokens, found.held_back_tokens) == (64, 64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for index, layer in enumerate(found.layers):
        for each in layer.linears:
            seen: list[torch.Tensor] = []
            linear = model.model.layers[index].get_submodule(each.name)
            handle = linear.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].double()))
            with torch.no_grad():
                model(input_ids=torch.stack(WINDOWS.calibration))
            handle.remove()
            assert each.input_mean == pytest.approx(float(seen[0].mean()), abs=1e-5)
            assert each.input_variance == pytest.approx(float(seen[0].var(correction=0)), rel=1e-4)
            assert (each.out_features, each.in_features) == (linear.out_features, linear.in_features)
            assert each.deviation["3"] > each.deviation["4"] > each.deviation["8"] > 0


@pytest.mark.slow  # test_losses.py has losses of mixed bits
def test_the_loss_at_16_bits_is_the_models_own(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2")
    found = calibrate(Subject(folder, "text"), WINDOWS, lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.stack(WINDOWS.held_back)
    with torch.no_grad():
        assert found.loss == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-5)
    increases = {each.bits: each.increase for each in found.measured}
    assert abs(increases[(8,) * 6]) < abs(increases[(3,) * 6])


def test_nothing_is_measured_unless_asked_for(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    found = calibrate(Subject(folder, "text"), Windows(WINDOWS.calibration, ()), lambda *_: None)
    assert (found.loss, found.measured, found.held_back_tokens) == (None, (), 0)


def test_a_model_without_lower_precisions_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "mixtral")
    with pytest.raises(UnsupportedModelError, match="fused experts"):
        calibrate(Subject(folder, "text"), WINDOWS, lambda *_: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the tokenizer and text of strata-tiny."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=4096, num_hidden_layers=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "heldout.txt"):
        shutil.copy(TINY / name, folder / name)
    return folder


def test_the_command_leaves_a_file_beside_the_checkpoint(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--tokens", "128", "--held-back-tokens", "64", "--window", "64"]) == 0
    written = model / CALIBRATION_FILE
    assert capsys.readouterr().out == f"{written}\n"
    found = Calibration.from_file(written, json.loads((model / "config.json").read_text()))
    assert (len(found.layers), found.tokens, found.held_back_tokens, found.text) == (2, 128, 64, "heldout.txt")
    assert not list(model.glob(".*"))


WRONG = {
    "no such text": (["--text", "none.txt"], "there is no none.txt: name a text"),
    "no such folder": (["--output", "/none/such/file.json"], "/none/such cannot be written"),
}


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_a_sentence(
    model: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model), *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--window", "8"], ["--tokens", "0"], ["--held-back-tokens", "some"]])
def test_wrong_flags(model: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(model), *flags])
