"""A model whose checkpoint is quantized already: each linear's format is its own, and its bytes are counted with group and order."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import stored_bytes
from strata_planner.question.families import linear_path
from strata_planner.question.model import Model
from strata_runtime.model.linears import KeptWeight
from tests.laws import swept
from tests.runtime.architectures import MODELS, REPRESENTATIVE, on_meta, tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LLAMA = SIZES | {"model_type": "llama"}
BASE = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": True}


def a_model(**description: Any) -> Model:
    return Model.from_config(LLAMA | {"quantization_config": BASE | description})


@pytest.mark.parametrize("name", swept(MODELS, REPRESENTATIVE))
def test_linears_are_named_as_in_the_model_that_transformers_builds(name: str) -> None:
    model_type, fields = tiny_config(name)
    config = CONFIG_MAPPING[model_type](**fields)
    module = on_meta(config)
    kinds = (nn.Linear, KeptWeight)
    real = {path: tuple(child.weight.shape) for path, child in module.named_modules() if isinstance(child, kinds)}
    for index, layer in enumerate(Model.from_config(config.to_dict(), for_serving=False).layers):
        for linear in layer.linears:
            if linear.copies == 1:
                assert real[linear_path(model_type, index, linear.name)] == (linear.out_features, linear.in_features)


def test_a_plain_model_has_no_stored_formats() -> None:
    model = Model.from_config(LLAMA)
    assert model.quantization is None
    assert set(model.stored_formats) == {None}


def test_every_linear_is_counted_as_the_checkpoint_holds_it() -> None:
    model = a_model(
        dynamic={r"-:.*\.0\.": {}, r".*\.2\.": {"bits": 8}, r".*\.3\.mlp.down": {"bits": 2, "group_size": -1}}
    )
    assert model.stored_formats == (None, "gptq4", "gptq8", "gptq4", "gptq4", "gptq4")
    up, down = (
        next(each for each in model.layers[3].linears if each.name == name) for name in ("up_proj", "down_proj")
    )
    assert up.format_in("gptq4") == "gptq4"
    assert up.weight_bytes("gptq4", "bfloat16") == stored_bytes("gptq4", 48, 32, "bfloat16", group=16, ordered=True)
    assert down.format_in("gptq4") == "gptq2"
    assert down.weight_bytes("gptq4", "bfloat16") == stored_bytes("gptq2", 32, 48, "bfloat16", group=48)
    assert down.weight_bytes("dense", "bfloat16") == 2 * 32 * 48


def test_a_linear_that_is_not_quantized_stays_dense_in_a_quantized_layer() -> None:
    model = a_model(modules_in_block_to_quantize=[["mlp.up_proj", "mlp.gate_proj"]])
    formats = {each.name: each.format_in("gptq4") for each in model.layers[0].linears}
    assert {name for name, format_name in formats.items() if format_name == "gptq4"} == {"up_proj", "gate_proj"}
    assert set(formats.values()) == {"gptq4", "dense"}


def test_other_formats_leave_only_what_routes_dense() -> None:
    model = Model.from_config(LLAMA)
    assert {each.format_in("int4") for each in model.layers[0].linears} == {"int4"}
    shared = Model.from_config(MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24})
    dense = {each.name for each in shared.layers[0].linears if each.format_in("int4") == "dense"}
    assert dense == {"shared_expert_gate"}
    assert model.layers[0].linears[0].weight_bytes("int4", "bfloat16") == stored_bytes("int4", 32, 32, "bfloat16")


MOE = SIZES | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 8,
}
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}


def test_experts_of_a_float8_checkpoint_are_counted_part_by_part() -> None:
    layer = Model.from_config(MOE | {"quantization_config": FLOAT8}).layers[0]
    assert layer.stored_format == "fp8_block"
    experts = {each.name: each for each in layer.linears if each.copies == 8}
    assert experts.keys() == {"experts.gate", "experts.up", "experts.down"}
    assert experts["experts.gate"].weight_bytes("fp8_block", "bfloat16") == 40 * 32 + 3 * 1 * 4
    assert experts["experts.down"].weight_bytes("fp8_block", "bfloat16") == 32 * 40 + 2 * 2 * 4
    assert layer.mlp_width == 2 * 2 * 40


@pytest.mark.parametrize(
    ("model_type", "skipped"),
    [("qwen3_moe", "mlp.experts.0.up_proj"), ("mixtral", r"model.layers.\d+.block_sparse_moe.experts")],
)
def test_experts_that_are_left_out_are_counted_dense(model_type: str, skipped: str) -> None:
    config = MOE | {"model_type": model_type, "num_local_experts": 8}
    model = Model.from_config(config | {"quantization_config": FLOAT8 | {"modules_to_not_convert": [skipped]}})
    up = next(each for each in model.layers[0].linears if each.name == "experts.up")
    assert up.format_in("fp8_block") == "dense"


def test_experts_of_a_gptq_checkpoint_are_counted_in_16_bits() -> None:
    layer = Model.from_config(MOE | {"quantization_config": BASE}).layers[0]
    assert layer.stored_format == "gptq4"
    assert {each.format_in("gptq4") for each in layer.linears if each.copies > 1} == {"dense"}


def test_other_methods_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="weights quantized by 'awq' are not read"):
        a_model(quant_method="awq")


def test_an_old_description_beside_config_json_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 16, "desc_act": False}))
    assert set(Model.from_folder(tmp_path).stored_formats) == {"gptq3"}
