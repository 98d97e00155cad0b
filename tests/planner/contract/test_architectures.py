"""What is refused from config.json alone, and what the refusal says."""

from typing import Any

import pytest

from strata_planner.contract.architectures import (
    SUPPORTED,
    UnsupportedModelError,
    check_architecture,
    check_formats,
    check_without_experts,
    layer_formats,
)
from strata_planner.contract.formats import FormatName

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "linear attention": (
        {"model_type": "kimi_linear"},
        "'kimi_linear' is not supported: the engine lacks linear attention other than Gated DeltaNet's",
    ),
    "linear attention without its adapter": (
        {"model_type": "olmo_hybrid"},
        "a tested adapter for its linear attention.* nearest that runs is qwen3_next",
    ),
    "state of another kind": (
        {"model_type": "lfm2", "layer_types": ["conv", "linear_attention"]},
        "layers of type 'linear_attention'",
    ),
    "state space": ({"model_type": "mamba2"}, "state-space layers"),
    "latent attention": (
        {"model_type": "deepseek_v2", "kv_lora_rank": 512},
        "latent attention other than DeepSeek-V3's",
    ),
    "latent attention elsewhere": ({"model_type": "new", "kv_lora_rank": 512}, "multi-head latent attention"),
    "alibi": ({"model_type": "mpt"}, "ALiBi"),
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder models"),
    "images": ({"model_type": "gemma3", "vision_config": {"a": 1}}, r"inputs other than text \(vision_config\)"),
    "text part": (
        {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
        "'ministral3' is not supported",
    ),
    "nearest": ({"model_type": "mpt"}, r"ALiBi position biases\. The nearest that runs is bloom\. Supported: "),
    "nearest name": ({"model_type": "qwen3_vl"}, r"The nearest name that runs is qwen3"),
    "unknown": ({"model_type": "brand_new"}, "a tested adapter for it. Supported: apertus, "),
    "layer types": (
        {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
        "layers of type 'linear_attention'",
    ),
    "windows untested": (
        {"model_type": "qwen2_moe", "use_sliding_window": True},
        "sliding windows in this architecture",
    ),
    "bidirectional": ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional attention"),
    "long rope": ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
    "dynamic rope": ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
    "rope of one layer type": (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        "rope type 'dynamic'",
    ),
    "quantized": (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
        "weights already quantized by 'gptq'",
    ),
    "no type": ({}, "config.json has no model_type"),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "text of images and text": {"model_type": "gemma3", "text_config": {}, "vision_config": {"a": 1}},
    "llama 3": {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "mistral window": {"model_type": "mistral", "sliding_window": 4096},
    "gemma 2": {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "qwen without its window": {"model_type": "qwen2_moe", "use_sliding_window": False, "sliding_window": 4096},
    "linear attention": {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
    "convolutions": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "nulls": {"model_type": "llama", "rope_scaling": None, "layer_types": None, "quantization_config": None},
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_architecture(config)


@pytest.mark.parametrize("config", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(config: dict[str, Any]) -> None:
    check_architecture(config)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_every_supported_type_passes_with_defaults(model_type: str) -> None:
    check_architecture({"model_type": model_type})


def test_several_reasons_are_all_named() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"linear attention other than .*, rope type 'dynamic', reading weights"
    ):
        check_architecture(
            {
                "model_type": "minimax",
                "rope_scaling": {"type": "dynamic"},
                "quantization_config": {"quant_method": "awq"},
            }
        )


def test_fused_experts_have_no_form_in_formats_that_are_made_beside_the_model() -> None:
    names: tuple[FormatName, ...] = ("dense", "int8", "int4", "fp8_block", "any4", "w8a8_static")
    assert layer_formats({"model_type": "mixtral"}, names) == ("dense", "int8", "int4", "fp8_block")
    assert layer_formats({"model_type": "llama"}, names) == names
    check_formats({"model_type": "mixtral"}, ("dense", "int4"))
    with pytest.raises(UnsupportedModelError, match=r"'mixtral' has fused experts.* any3, any4 cannot hold"):
        check_formats({"model_type": "mixtral"}, ("any4", "dense", "any3"))


def test_what_goes_through_linears_alone_refuses_experts() -> None:
    check_without_experts({"model_type": "llama"}, "calibration")
    with pytest.raises(UnsupportedModelError, match="'mixtral' has fused experts, which calibration does not know"):
        check_without_experts({"model_type": "mixtral"}, "calibration")
