"""Laws of loading a GPTQ checkpoint: at its own bits or at 16 it computes what a plain model of the same weights does, in the bytes that are planned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.quantization import Zeros
from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.formats import stored_bytes_of
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.gptq_models import formats_of, make_gptq_model, make_plain_model
from tests.runtime.loading.parity import logits
from tests.runtime.loading.stages import load, roles

torch.set_num_threads(1)
LAYERS = 6


VARIANTS: dict[str, tuple[dict[str, Any], Zeros]] = {
    "v1": ({}, "less one"),
    "v1 of GPTQModel, asymmetric": ({"sym": False, "meta": {"quantizer": ["gptqmodel:7.0"]}}, "less one in words"),
    "v2": ({"checkpoint_format": "gptq_v2", "sym": False}, "plain"),
    "act-order": ({"desc_act": True}, "less one"),
    "whole rows": ({"group_size": -1, "bits": 8}, "less one"),
    "three bits": ({"bits": 3, "sym": False, "desc_act": True}, "less one"),
    "two bits": ({"bits": 2, "group_size": 8}, "less one"),
    "layers of their own bits": (
        {"dynamic": {r"-:.*\.0\.": {}, r"+:.*\.2\.": {"bits": 8}, r".*\.3\.mlp": {"bits": 2}}},
        "less one",
    ),
}


@pytest.mark.parametrize("name", swept(VARIANTS, ["layers of their own bits"]))
def test_a_variant_computes_what_a_plain_model_of_its_weights_does(name: str, tmp_path: Path) -> None:
    description, convention = VARIANTS[name]
    plain, quantized = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"
    weights = make_gptq_model(plain, quantized, description, convention=convention)
    wanted = logits(make_plain_model(quantized, tmp_path / "same", weights), ("dense",) * LAYERS)
    assert torch.allclose(logits(quantized, formats_of(quantized)), wanted, atol=1e-5)
    assert torch.equal(logits(quantized, ("dense",) * LAYERS), wanted)


@pytest.mark.parametrize("name", swept(["opt", "phi3", "gpt_neox", "starcoder2", "qwen2", "gemma2"], ["gpt_neox"]))
def test_architectures_name_their_linears_each_in_its_way(name: str, tmp_path: Path) -> None:
    plain, quantized = make_tiny_model(tmp_path / "plain", name), tmp_path / "gptq"
    weights = make_gptq_model(plain, quantized, {"desc_act": True})
    formats = formats_of(quantized)
    assert set(formats) == {"gptq4"}
    wanted = logits(make_plain_model(quantized, tmp_path / "same", weights), ("dense",) * LAYERS)
    assert torch.allclose(logits(quantized, formats), wanted, atol=2e-4)
    whole = load(roles(quantized, 1, formats=formats)[0], quantized)
    stored = [linear for layer in range(LAYERS) for linear in whole.linears(layer).values()]
    assert all(isinstance(linear, GptqLinear) for linear in stored)


def test_layers_take_the_bytes_that_the_planner_counts(tmp_path: Path) -> None:
    description = {"desc_act": True, "dynamic": {r".*\.2\.": {"bits": 8}, r".*\.3\.mlp": {"bits": 3, "group_size": 32}}}
    quantized = tmp_path / "gptq"
    make_gptq_model(make_tiny_model(tmp_path / "plain", "llama-tied-bias"), quantized, description)
    model, formats = Model.from_folder(quantized), formats_of(quantized)
    stage = load(roles(quantized, 1, formats=formats)[0], quantized)
    for layer, shape in enumerate(model.layers):
        real = {key.rpartition(".")[2]: module for key, module in stage.linears(layer).items()}
        for linear in shape.linears:
            bias = 4 * linear.out_features * linear.bias
            counted = linear.weight_bytes(formats[layer], "float32") + bias
            assert stored_bytes_of(real[linear.name]) == counted, linear.name


@pytest.mark.slow  # test_float8.py has experts
def test_experts_are_read_whatever_their_parts_are_stored_in(tmp_path: Path) -> None:
    plain, quantized = make_tiny_model(tmp_path / "plain", "mixtral"), tmp_path / "gptq"
    weights = make_gptq_model(plain, quantized, {})
    assert sum(".experts." in key for key in load_file(quantized / "model.safetensors")) > len(weights) / 2
    wanted = logits(make_plain_model(quantized, tmp_path / "same", weights), ("dense",) * LAYERS)
    assert torch.equal(logits(quantized, ("dense",) * LAYERS), wanted)


def test_linears_that_are_not_quantized_stay_dense_in_a_quantized_layer(tmp_path: Path) -> None:
    quantized = tmp_path / "gptq"
    make_gptq_model(
        make_tiny_model(tmp_path / "plain", "llama"), quantized, {"modules_in_block_to_quantize": [["mlp.up_proj"]]}
    )
    linears = load(roles(quantized, 1, formats=("gptq4",) * LAYERS)[0], quantized).linears(0)
    quantized_ones = {key for key, linear in linears.items() if isinstance(linear, GptqLinear)}
    assert quantized_ones == {"model.layers.0.mlp.up_proj"}


def test_a_quantized_head_is_read(tmp_path: Path) -> None:
    plain, quantized = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"
    weights = make_gptq_model(plain, quantized, {"lm_head": True}, quantize=lambda key, _: key == "lm_head.weight")
    wanted = logits(make_plain_model(quantized, tmp_path / "same", weights), ("dense",) * LAYERS)
    assert torch.equal(logits(quantized, ("dense",) * LAYERS), wanted)


def test_the_old_description_beside_config_json_counts(tmp_path: Path) -> None:
    plain, quantized = make_tiny_model(tmp_path / "plain", "llama"), tmp_path / "gptq"
    weights = make_gptq_model(plain, quantized, {"bits": 3})
    config = json.loads((quantized / "config.json").read_text())
    described = config.pop("quantization_config")
    del described["quant_method"]
    (quantized / "config.json").write_text(json.dumps(config))
    (quantized / "quantize_config.json").write_text(json.dumps(described))
    assert formats_of(quantized) == ("gptq3",) * LAYERS
    wanted = logits(make_plain_model(quantized, tmp_path / "same", weights), ("dense",) * LAYERS)
    assert torch.allclose(logits(quantized, ("gptq3",) * LAYERS), wanted, atol=1e-5)


NAME = "model.layers.1.mlp.up_proj"


def _damage(folder: Path, **changed: torch.Tensor | None) -> None:
    """Part of the linear NAME -> what it becomes; None: it goes."""
    tensors = load_file(folder / "model.safetensors")
    for part, tensor in changed.items():
        tensors.pop(f"{NAME}.{part}", None)
        if tensor is not None:
            tensors[f"{NAME}.{part}"] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


DAMAGED: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no scales": ({"scales": None}, rf"{NAME}: the checkpoint has no scales"),
    "scales of another model": (
        {"scales": torch.ones(3, 64)},
        rf"{NAME}.scales: shape \[3, 64\]; 32 inputs and 48 outputs",
    ),
    "group out of range": ({"g_idx": torch.full((32,), 7, dtype=torch.int32)}, rf"{NAME}.g_idx: groups from 7 to 7"),
    "empty scales": ({"scales": torch.zeros(2, 48)}, rf"{NAME}.scales: all scales of group 0 are zero"),
    "groups of unlike sizes": (
        {"g_idx": (torch.arange(32) // 20).int()},
        f"{NAME}: its groups have from 12 to 20 inputs",
    ),
}


@pytest.mark.parametrize(("changed", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_refused_with_the_tensors_name(
    changed: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    quantized = tmp_path / "gptq"
    make_gptq_model(make_tiny_model(tmp_path / "plain", "llama"), quantized, {})
    _damage(quantized, **changed)
    with pytest.raises(InputError, match=message):
        load(roles(quantized, 1, formats=("gptq4",) * LAYERS)[0], quantized)


def test_a_description_that_leaves_out_what_is_quantized_is_refused(tmp_path: Path) -> None:
    quantized = tmp_path / "gptq"
    make_gptq_model(make_tiny_model(tmp_path / "plain", "llama"), quantized, {})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {r"-:.*\.1\.mlp": {}}
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"mlp\.\w+\.qweight is in the checkpoint, and .* is not quantized"):
        load(roles(quantized, 1)[0], quantized)


def test_quantized_layers_of_a_plain_model_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    with pytest.raises(InputError, match=r"the plan has layers of gptq4, and .* is not quantized: plan again"):
        load(roles(model, 1, formats=("gptq4",) * LAYERS)[0], model)


def test_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    quantized = tmp_path / "gptq"
    make_gptq_model(make_tiny_model(tmp_path / "plain", "llama"), quantized, {})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="weights quantized by 'awq' are not read"):
        load(roles(quantized, 1)[0], quantized)
