"""A checkpoint's config.json is a stranger's: whatever it holds, the planner reads a model or says what is wrong with it."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata_planner.contract.architectures import SUPPORTED, UnsupportedModelError
from strata_planner.errors import InputError, ModelError
from strata_planner.question.config_fields import LISTS, OBJECTS, WHOLE_NUMBERS
from strata_planner.question.model import Model
from tests.laws import share

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "meta": {"quantizer": ["gptqmodel:1"]}}
READ = (
    *(*WHOLE_NUMBERS, *OBJECTS, *LISTS, "model_type", "tie_word_embeddings", "sliding_window", "use_sliding_window"),
    *("is_encoder_decoder", "vision_config", "kv_lora_rank", "alibi", "attention_bias", "do_layer_norm_before"),
)
DESCRIBED = (
    *(
        "quant_method",
        "method",
        "bits",
        "group_size",
        "desc_act",
        "sym",
        "static_groups",
        "checkpoint_format",
        "format",
    ),
    *("dynamic", "modules_in_block_to_quantize", "meta", "is_marlin_format"),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([10**400, -1])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*DESCRIBED, "rope_type", "-:x", "+:(", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=share(150), deadline=None)
@given(
    st.sampled_from(sorted(SUPPORTED)),
    st.dictionaries(st.sampled_from(READ), values, max_size=3),
    st.dictionaries(st.sampled_from(DESCRIBED), values, max_size=3),
    st.booleans(),
)
@example("llama", {"rope_scaling": 3}, {}, True)
@example("llama", {"layer_types": [[]]}, {}, True)
@example("qwen2_moe", {"decoder_sparse_step": "x"}, {}, True)
@example("qwen2_moe", {"mlp_only_layers": 3}, {}, True)
@example("llama", {"num_attention_heads": 512, "num_key_value_heads": None}, {}, True)
@example("llama", {}, {"dynamic": {"+:a": 3}}, True)
@example("llama", {}, {"modules_in_block_to_quantize": 3}, True)
@example("llama", {}, {"meta": {"quantizer": 3}}, True)
def test_any_json_is_a_model_or_an_error_of_the_planner(
    family: str,
    fields: dict[str, Any],
    described: dict[str, Any],
    for_serving: bool,  # noqa: FBT001
) -> None:
    quantized = {"quantization_config": {**GPTQ, **described}} if described else {}
    config = json.loads(json.dumps({**CONFIG, "model_type": family, **quantized, **fields}))
    try:
        model = Model.from_config(config, for_serving=for_serving)
    except (InputError, UnsupportedModelError):
        pass
    else:
        assert model.parameters > 0
        assert model.num_layers > 0


@pytest.mark.parametrize("config", [3, None, [], "x", True])
def test_a_config_that_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(ModelError, match="an object with model_type is needed"):
        Model.from_config(config)


def test_the_sentence_names_field_value_and_rule() -> None:
    with pytest.raises(ModelError, match=r"config.json: rope_scaling is 3; an object is needed: fetch the model again"):
        Model.from_config({**CONFIG, "rope_scaling": 3})


def test_a_billion_layers_are_refused_before_they_are_made() -> None:
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000000; a whole number of 0 to 4096"):
        Model.from_config({**CONFIG, "num_hidden_layers": 10**9})
