"""What `quantization_config` says of each linear, as GPTQModel and vLLM understand it; other methods and nonsense are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.quantization import (
    BlockFloat8,
    ModuleQuantization,
    Quantization,
    read_quantization,
    with_old_description,
    without_description,
)

BASE: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
QUERY, DOWN = "model.layers.18.self_attn.q_proj", "model.layers.3.mlp.down_proj"
PLAIN = ModuleQuantization(bits=4, group=128, ordered=False, symmetric=True)


def read(**fields: Any) -> Quantization:
    quantization = read_quantization({"model_type": "llama", "quantization_config": BASE | fields})
    assert isinstance(quantization, Quantization)
    return quantization


def test_a_model_that_is_not_quantized_has_none() -> None:
    assert read_quantization({"model_type": "llama"}) is None
    assert read_quantization({"quantization_config": None}) is None


CASES: dict[str, tuple[dict[str, Any], str, ModuleQuantization | None]] = {
    "plain": ({}, QUERY, PLAIN),
    "old description without a method": (
        {"quant_method": None, "bits": 3},
        QUERY,
        ModuleQuantization(3, 128, False, True),
    ),
    "act-order": ({"desc_act": True}, QUERY, ModuleQuantization(4, 128, True, True)),
    "act-order within static groups": ({"desc_act": True, "static_groups": True}, QUERY, PLAIN),
    "static groups under meta": ({"desc_act": True, "meta": {"static_groups": True}}, QUERY, PLAIN),
    "act-order of one group": ({"desc_act": True, "group_size": -1}, QUERY, ModuleQuantization(4, None, False, True)),
    "asymmetric": ({"sym": False}, QUERY, ModuleQuantization(4, 128, False, False)),
    "overridden": (
        {"dynamic": {"+:.*\\.18\\..*": {"bits": 8, "group_size": 64}}},
        QUERY,
        ModuleQuantization(8, 64, False, True),
    ),
    "overridden without a sign": (
        {"dynamic": {".*q_proj": {"desc_act": True}}},
        QUERY,
        ModuleQuantization(4, 128, True, True),
    ),
    "another module's override": ({"dynamic": {".*\\.18\\..*": {"bits": 8}}}, DOWN, PLAIN),
    "the first match decides": (
        {"dynamic": {".*q_proj": {"bits": 2}, ".*": {"bits": 8}}},
        QUERY,
        ModuleQuantization(2, 128, False, True),
    ),
    "skipped": ({"dynamic": {"-:.*\\.18\\.": {}, ".*": {"bits": 8}}}, QUERY, None),
    "a match begins at the beginning": ({"dynamic": {"-:q_proj": {}}}, QUERY, PLAIN),
    "only some modules": ({"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, DOWN, None),
    "one of some modules": ({"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, QUERY, PLAIN),
    "a flat list of modules": ({"modules_in_block_to_quantize": ["mlp.down_proj"]}, DOWN, PLAIN),
}


@pytest.mark.parametrize(("fields", "path", "wanted"), CASES.values(), ids=CASES)
def test_how_a_module_is_stored(fields: dict[str, Any], path: str, wanted: ModuleQuantization | None) -> None:
    assert read(**fields).of(path) == wanted


ZEROS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing said": ({}, "less one"),
    "v1": ({"checkpoint_format": "gptq"}, "less one"),
    "v1 of GPTQModel": (
        {"checkpoint_format": "gptq", "meta": {"quantizer": ["optimum:1.2", "gptqmodel:4.0"]}},
        "less one in words",
    ),
    "v1 of auto-gptq": ({"checkpoint_format": "gptq", "meta": {"quantizer": "autogptq:0.7"}}, "less one"),
    "v2": ({"checkpoint_format": "gptq_v2"}, "plain"),
    "v2 by its other name": ({"format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:4.0"]}}, "plain"),
}


@pytest.mark.parametrize(("fields", "zeros"), ZEROS.values(), ids=ZEROS)
def test_how_zeros_are_stored(fields: dict[str, Any], zeros: str) -> None:
    assert read(**fields).zeros == zeros


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "awq"}, "weights quantized by 'awq' are not read; GPTQ's are"),
    "five bits": ({"bits": 5}, "bits is 5; weights of 2, 3, 4 or 8 bits are read"),
    "no bits": ({"bits": None}, "bits is None"),
    "bits that are none": ({"bits": [4]}, r"bits is \[4\]"),
    "no group": ({"group_size": 0}, "group_size is 0; .* -1 for a whole row"),
    "a kernel's layout": ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is a kernel's own layout"),
    "marlin by its old name": ({"is_marlin_format": True}, "checkpoint_format 'marlin'"),
    "no expression": ({"dynamic": {"+:(": {}}}, r"dynamic '\+:\(' is no regular expression"),
    "an override of no bits": ({"dynamic": {".*": {"bits": 6}}}, r"dynamic '\.\*' bits is 6"),
    "dynamic that is a list": ({"dynamic": [1]}, r"dynamic is \[1\]"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_read_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(**fields)


BLOCKS = ModuleQuantization(8, None, False, True, (128, 64))
SKIPPED: dict[str, tuple[list[str], str, ModuleQuantization | None]] = {
    "nothing": ([], QUERY, BLOCKS),
    "the head": (["lm_head"], QUERY, BLOCKS),
    "its path": ([QUERY], QUERY, None),
    "its end": (["q_proj"], QUERY, None),
    "what it lies in": (["model.layers.18"], QUERY, None),
    "a longer number": (["model.layers.1"], QUERY, BLOCKS),
    "an expression": ([r"model\.layers\..*attn"], QUERY, None),
    "another's name that its own begins with": (["model.layers.3.mlp.down"], DOWN, BLOCKS),
}


@pytest.mark.parametrize(("skipped", "path", "wanted"), SKIPPED.values(), ids=SKIPPED)
def test_what_a_float8_description_leaves_out(skipped: list[str], path: str, wanted: ModuleQuantization | None) -> None:
    fields = {"quant_method": "fp8", "weight_block_size": [128, 64], "modules_to_not_convert": skipped}
    quantization = read_quantization({"quantization_config": fields})
    assert isinstance(quantization, BlockFloat8)
    assert quantization.of(path) == wanted


FLOAT8_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a scale for all": ({"weight_block_size": None}, "weight_block_size of fp8 is None; a scale for each block"),
    "one number": ({"weight_block_size": [128]}, r"weight_block_size of fp8 is \[128\]"),
    "no block": ({"weight_block_size": [128, 0]}, "weight_block_size"),
    "another type": ({"fmt": "e5m2"}, "fmt is 'e5m2'; 'e4m3' is read"),
    "calibrated activations": ({"activation_scheme": "static"}, "activation_scheme is 'static'; 'dynamic' is read"),
    "no list": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; a list of names"),
    "no expression": ({"modules_to_not_convert": ["("]}, r"modules_to_not_convert '\(' is no regular expression"),
}


@pytest.mark.parametrize(("fields", "message"), FLOAT8_REFUSED.values(), ids=FLOAT8_REFUSED)
def test_another_float8_is_refused(fields: dict[str, Any], message: str) -> None:
    whole = {"quant_method": "fp8", "weight_block_size": [128, 128]} | fields
    with pytest.raises(UnsupportedModelError, match=message):
        read_quantization({"quantization_config": whole})


def test_a_description_that_is_no_object_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="an object is needed"):
        read_quantization({"quantization_config": "gptq"})


def test_the_old_file_counts_where_config_says_nothing(tmp_path: Path) -> None:
    config = {"model_type": "llama"}
    assert with_old_description(config, tmp_path) == config
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 64, "desc_act": False}))
    merged = with_old_description(config, tmp_path)
    quantization = read_quantization(merged)
    assert isinstance(quantization, Quantization)
    assert quantization.bits == 3
    assert without_description(merged) == config
    newer = {"quantization_config": BASE}
    assert with_old_description(newer, tmp_path) == newer


def test_an_unreadable_old_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="cannot be read as JSON"):
        with_old_description({}, tmp_path)


@pytest.mark.parametrize("odd", [{"fmt": ["e4m3"]}, {"activation_scheme": {}}])
def test_float8_fields_of_another_kind_are_refused(odd: dict[str, object]) -> None:
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128], **odd}
    with pytest.raises(UnsupportedModelError, match=rf"{next(iter(odd))} is .*Name the unquantized model"):
        read_quantization({"quantization_config": fields})
