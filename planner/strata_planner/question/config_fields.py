"""The shape of config.json: which kind of JSON each field must be that the planner reads, before anybody reads it.

Called by `model` alone. A checkpoint's config is a stranger's: whatever it holds, the answer is a model or a sentence.
Fields that nobody reads may hold anything. Knows no architecture.
"""

from collections.abc import Mapping
from typing import Any

from strata_planner.errors import ModelError

_LIMIT = 1 << 31  # products of a few such numbers stay far within a float
_MOST_LAYERS = 4096  # the longest known has 126
_MOST_EXPERTS = 65_536
_MOST_HEADS = 65_536  # of a linear attention, and values of one

WHOLE_NUMBERS: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), _MOST_LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "word_embed_proj_dim", "vocab_size"), _LIMIT),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "head_dim"), _LIMIT),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), _LIMIT),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _LIMIT),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), _LIMIT),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), _MOST_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k"), _MOST_EXPERTS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), _LIMIT),
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), _MOST_HEADS
    ),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache", "block_multiple_of"), _MOST_HEADS),
    **dict.fromkeys(
        (
            "full_attention_interval",
            "decoder_sparse_step",
            "interleave_moe_layer_step",
            "first_k_dense_replace",
            "num_dense_layers",
            "num_ln_in_parallel_attn",
        ),
        _MOST_LAYERS,
    ),
}
OBJECTS = ("rope_scaling", "rope_parameters", "quantization_config")
LISTS: dict[str, type] = {
    "layer_types": str,
    "mlp_layer_types": str,
    "mlp_only_layers": int,
    "moe_layers": int,
    "full_attn_idxs": int,
}
TEXTS = ("model_type",)


def check_fields(config: Mapping[str, Any]) -> None:
    """Raises ModelError that names the first field of another kind. Absent and null are as good."""
    for name, most in WHOLE_NUMBERS.items():
        _check(config, name, _is_number(config.get(name), most), f"a whole number of 0 to {most}")
    for name in OBJECTS:
        _check(config, name, isinstance(config.get(name), Mapping), "an object")
    for name, kind in LISTS.items():
        value = config.get(name)
        fits = isinstance(value, list | tuple) and all(type(each) is kind for each in value)
        _check(config, name, fits, f"a list of {'texts' if kind is str else 'whole numbers'}")
    for name in TEXTS:
        _check(config, name, isinstance(config.get(name), str), "a text")


def _is_number(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _check(config: Mapping[str, Any], name: str, fits: bool, needed: str) -> None:  # noqa: FBT001
    value = config.get(name)
    if value is None or fits:
        return
    shown = repr(value)
    raise ModelError(
        f"config.json: {name} is {shown if len(shown) <= 80 else f'{shown[:77]}...'}; {needed} is needed: "
        "fetch the model again, or correct the field"
    )
