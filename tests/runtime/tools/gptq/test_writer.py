"""Laws of writing GPTQ checkpoints: what was written is read, whole files only, other tools understand the description, a broken run goes on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPTQConfig

from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.formats import PrecisionError
from strata_runtime.formats.gptq import GptqCodes
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.quantized import QuantizedCheckpoint, quantized_checkpoint
from strata_runtime.tools.calibration.kept import FOLDER
from strata_runtime.tools.calibration.layers import LayeredModel, Piece
from strata_runtime.tools.gptq.__main__ import main
from strata_runtime.tools.gptq.calibrated import Job, quantize_model
from strata_runtime.tools.gptq.description import Description
from strata_runtime.tools.gptq.solver import GptqSettings, round_to_nearest
from strata_runtime.tools.gptq.writer import write_gptq
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.gptq_models import permuted

torch.set_num_threads(1)
LAYERS = 6
TINY = Path("examples/models/strata-tiny")
WINDOWS = [torch.randint(3, 96, (24,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def settings(**changed: Any) -> GptqSettings:
    return GptqSettings(**({"bits": 4, "group": 16} | changed))


def written(model: Path, output: Path, description: Description) -> dict[str, GptqCodes]:
    """All linears rounded to nearest (groups in an order of their own, if so described), by name."""
    tensors = load_file(model / "model.safetensors")
    layers: list[dict[str, GptqCodes]] = []
    for layer, bits in enumerate(description.layer_bits):
        chosen = {
            name: tensor
            for name, tensor in tensors.items()
            if f".layers.{layer}." in name and tensor.ndim == 2 and bits < 16
        }
        described = description.settings
        here = GptqSettings(bits if bits < 16 else 4, described.group, described.symmetric)
        codes = {name.removesuffix(".weight"): round_to_nearest(tensor, here) for name, tensor in chosen.items()}
        layers.append({name: permuted(each) if described.ordered else each for name, each in codes.items()})
    write_gptq(model, Checkpoint(model).files, output, layers, description)
    return {name: codes for layer in layers for name, codes in layer.items()}


DESCRIPTIONS: dict[str, Description] = {
    "v1": Description(settings(), (4,) * LAYERS),
    "v1 asymmetric": Description(settings(symmetric=False), (4,) * LAYERS),
    "v2 asymmetric": Description(settings(symmetric=False), (4,) * LAYERS, "gptq_v2"),
    "v2": Description(settings(bits=3), (3,) * LAYERS, "gptq_v2"),
    "ordered groups": Description(settings(static_groups=False), (4,) * LAYERS),
    "whole rows": Description(settings(bits=8, group=None), (8,) * LAYERS),
    "bits of each layer": Description(settings(symmetric=False), (16, 4, 8, 4, 3, 2)),
}


@pytest.mark.parametrize("name", swept(DESCRIPTIONS, ["v1", "bits of each layer"]))
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    description = DESCRIPTIONS[name]
    model, output = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"
    codes = written(model, output, description)
    checkpoint, plain = quantized_checkpoint(output), load_file(model / "model.safetensors")
    assert isinstance(checkpoint, QuantizedCheckpoint)
    assert set(checkpoint.keys) == set(plain)
    read = checkpoint.read(checkpoint.keys, torch.float32, torch.device("cpu"))
    for key, tensor in plain.items():
        name = key.removesuffix(".weight")
        assert torch.equal(read[key], codes[name].dequantized() if name in codes else tensor), key
    bits = tuple(int(name.removeprefix("gptq")) if name else 16 for name in Model.from_folder(output).stored_formats)
    assert bits == description.layer_bits


@pytest.mark.parametrize("description", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_transformers_understands_the_description(description: Description) -> None:
    read = GPTQConfig.from_dict(description.config())
    assert (read.bits, read.group_size) == (description.base_bits, description.settings.group or -1)
    assert (read.desc_act, read.sym) == (description.settings.ordered, description.settings.symmetric)
    assert read.format == description.checkpoint_format


def test_patterns_match_fused_modules_from_the_beginning_too() -> None:
    """As vLLM asks for them: `re.match` on a path whose linears are merged."""
    dynamic = DESCRIPTIONS["bits of each layer"].config()["dynamic"]
    found = {
        layer: [key[:2] + str(value.get("bits", "")) for key, value in dynamic.items() if re.match(key[2:], path)]
        for layer in range(12)
        for path in [f"model.layers.{layer}.self_attn.qkv_proj"]
    }
    assert found == {0: ["-:"], 2: ["+:8"], 4: ["+:3"], 5: ["+:2"]} | {
        layer: [] for layer in (1, 3, 6, 7, 8, 9, 10, 11)
    }


def test_the_index_counts_and_the_old_description_is_the_same(tmp_path: Path) -> None:
    model, output = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"
    (model / "tokenizer.json").write_text("{}")
    written(model, output, DESCRIPTIONS["v1"])
    index = json.loads((output / "model.safetensors.index.json").read_text())
    tensors = {
        key: tensor for name in set(index["weight_map"].values()) for key, tensor in load_file(output / name).items()
    }
    assert set(tensors) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert (output / "tokenizer.json").read_text() == "{}"
    config = json.loads((output / "config.json").read_text())
    assert json.loads((output / "quantize_config.json").read_text()) == config["quantization_config"]
    assert not list(output.glob(".*"))
    assert all(path.stat().st_mode & 0o044 for path in output.iterdir())


def a_job(model: Path, output: Path, **changed: Any) -> Job:
    return Job(model, output, **({"description": DESCRIPTIONS["bits of each layer"], "text": "text"} | changed))


class BrokenError(Exception):
    """The run was stopped."""


@pytest.mark.slow
def test_a_broken_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole, resumed = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "whole", tmp_path / "resumed"
    quantize_model(a_job(model, whole), WINDOWS, lambda _done, _total: None)

    def stop(done: float, _total: int) -> None:
        if done > 3.4:
            raise BrokenError

    with pytest.raises(BrokenError):
        quantize_model(a_job(model, resumed), WINDOWS, stop)
    assert not (resumed / "config.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in resumed.glob("*.safetensors")}
    assert len(kept) == 3
    real, loaded = LayeredModel.layer, []

    def layer(self: LayeredModel, index: int) -> Piece:
        loaded.append(index)
        return real(self, index)

    monkeypatch.setattr(LayeredModel, "layer", layer)
    quantize_model(a_job(model, resumed), WINDOWS, lambda _done, _total: None)
    assert loaded == [3, 4, 5], "layers that are there are not passed again"
    assert not (resumed / FOLDER).exists()
    for path in whole.glob("*.safetensors"):
        ours, theirs = load_file(resumed / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert {name: (resumed / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.parametrize("damage", swept(["cut off", "made otherwise"], ["cut off"]))
def test_what_another_run_left_is_made_again(damage: str, tmp_path: Path) -> None:
    model, output = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"

    def stop(done: float, _total: int) -> None:
        if done >= 2:
            raise BrokenError

    with pytest.raises(BrokenError):
        quantize_model(a_job(model, output), WINDOWS, stop)
    first = min(output.glob("*.safetensors"))
    before, windows = first.stat().st_mtime_ns, WINDOWS
    if damage == "cut off":
        first.write_bytes(first.read_bytes()[:-10])
    else:
        windows = WINDOWS[:-1]
    quantize_model(a_job(model, output), windows, lambda _done, _total: None)
    assert first.stat().st_mtime_ns > before
    assert quantized_checkpoint(output) is not None


def test_progress_ends_where_the_model_does(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []
    model = make_tiny_model(tmp_path / "plain", "opt")
    quantize_model(a_job(model, tmp_path / "gptq"), WINDOWS, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (LAYERS, LAYERS)


def test_a_finished_model_is_not_written_over(tmp_path: Path) -> None:
    model, output = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"
    written(model, output, DESCRIPTIONS["v1"])
    with pytest.raises(InputError, match="holds a model already"):
        written(model, output, DESCRIPTIONS["v1"])
    with pytest.raises(InputError, match="is the model itself"):
        written(model, model, DESCRIPTIONS["v1"])


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "bits of a layer": (
        lambda: Description(settings(), (4, 5)),
        PrecisionError,
        "layers of 5 bits: choose from 2, 3, 4, 8 and 16",
    ),
    "nothing to do": (lambda: Description(settings(), (16, 16)), PrecisionError, "every layer is left at 16 bits"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_bits_for_other_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "plain", "llama")
    job = a_job(model, tmp_path / "gptq", description=Description(settings(), (4, 4)))
    with pytest.raises(InputError, match="bits for 2 layers, and the model has 6"):
        quantize_model(job, WINDOWS, lambda _done, _total: None)


@pytest.mark.slow
def test_the_command_writes_a_model_that_is_planned_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gptq"
    flags = [
        "--layer-bits",
        "0=8,3-4=16",
        "--tokens",
        "256",
        "--window",
        "64",
        "--group",
        "64",
        "--output",
        str(output),
    ]
    assert main([str(TINY), "--bits", "3", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    formats = Model.from_folder(output).stored_formats
    assert formats == ("gptq8", "gptq3", "gptq3", None, None, *["gptq3"] * 7)


COMMANDS: dict[str, tuple[list[str], str]] = {
    "no such layer": (["--layer-bits", "12=8"], "there is no layer 12; the model has layers 0 to 11"),
    "no text": (["--text", "absent.txt"], "there is no absent.txt"),
    "finished already": (["--output", str(TINY)], "is the model itself"),
}


@pytest.mark.parametrize(("flags", "message"), COMMANDS.values(), ids=COMMANDS)
def test_the_command_refuses_with_a_reason(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(TINY), "--output", str(tmp_path / "gptq"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"
    written(model, output, DESCRIPTIONS["v1"])
    assert main([str(output), "--output", str(tmp_path / "again")]) == 2
    assert "is quantized already" in capsys.readouterr().err
