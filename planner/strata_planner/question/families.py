"""What config.json leaves unsaid: how the decoder layers of each model family are built.

Read by `model` alone. A row per `model_type`; a family that is not listed counts as Llama's. Checked against the modules that
transformers builds (tests/planner/question/test_model_shapes.py, tests/planner/question/test_quantized_models.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Flag = bool | tuple[str, bool]  # a constant, or a config key with its default


def _parallel_residual(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_parallel_residual"))


def _falcon_shares_norm(config: Mapping[str, Any]) -> bool:
    """Side by side attention and MLP have one norm, unless the new decoder has two."""
    two = bool(config.get("new_decoder_architecture")) and config.get("num_ln_in_parallel_attn") in {None, 2}
    return bool(config.get("parallel_attn", True)) and not two


@dataclass(frozen=True)
class Family:
    """Biases, norms and fused projections of one family. `grouped_queries` False: a key head per query head, whatever
    config.json says. `norms`: vectors of the hidden size in each layer, one less where `shares_norm` of config.json.

    `gated_attention`: queries come with a gate for what they attend to.
    `sinks`: a score of each head that no key has. `expert_bias`: experts and what routes to them have biases.

    `latent`: keys and values are projections of one entry, which is kept. `routing_bias`: a float32 value of each expert.
    `shares_expert`: beside the experts that tokens are sent to is one of their width that all pass.
    `qk_norm`: normalisation of queries and keys per head ("head": one vector for all heads), over their whole width
    ("full"), or for each head its own ("heads"); with `qk_norm_key` only where that config key is true.
    """

    gated: bool = True
    grouped_queries: bool = True
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qkv_bias: Flag = ("attention_bias", False)
    out_bias: Flag = ("attention_bias", False)
    mlp_bias: Flag = ("mlp_bias", False)
    head_bias: bool = False
    norms: int = 2
    shares_norm: Callable[[Mapping[str, Any]], bool] | None = None
    norm_bias: bool = False
    affine_norm: bool = True
    gated_attention: bool = False
    sinks: bool = False
    latent: bool = False
    shares_expert: bool = False
    routing_bias: Flag = False
    expert_bias: bool = False  # of routers too
    qk_norm: Literal["", "head", "full", "heads"] = ""
    qk_norm_key: str = ""
    tied: bool = False
    positions_offset: int | None = None  # learned positions: how many more rows than positions
    embedding_norm: bool = False
    other_per_layer: int = 0


_LLAMA = Family()
_DEEPSEEK = Family(latent=True, shares_expert=True, routing_bias=True)
_GEMMA = Family(tied=True)
_GATED_QUERIES = Family(mlp_bias=False, qk_norm="head", gated_attention=True)
_SHORT_CONVOLUTIONS = Family(qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm="head", tied=True)
_FULL_NORMS = Family(qk_norm="full")

FAMILIES: dict[str, Family] = {
    "apertus": Family(gated=False, qk_norm="head", other_per_layer=2),
    "arcee": Family(gated=False),
    "bloom": Family(
        gated=False,
        grouped_queries=False,
        fused_qkv=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_bias=True,
        tied=True,
        embedding_norm=True,
    ),
    "cohere": Family(norms=1, tied=True, qk_norm="heads", qk_norm_key="use_qk_norm"),
    "cohere2": Family(norms=1, tied=True),
    "deepseek_v3": _DEEPSEEK,
    "ernie4_5": Family(
        qkv_bias=("use_bias", False), out_bias=("use_bias", False), mlp_bias=("use_bias", False), tied=True
    ),
    "exaone4": Family(qk_norm="head"),
    "falcon": Family(
        gated=False,
        fused_qkv=True,
        qkv_bias=("bias", False),
        out_bias=("bias", False),
        mlp_bias=("bias", False),
        norm_bias=True,
        shares_norm=_falcon_shares_norm,
        tied=True,
    ),
    "gemma": _GEMMA,
    "gemma2": Family(tied=True, norms=4),
    "gemma3_text": Family(tied=True, norms=4, qk_norm="head"),
    "glm": Family(fused_gate_up=True, out_bias=False),
    "glm4": Family(fused_gate_up=True, out_bias=False, norms=4),
    "glm4_moe": Family(
        out_bias=False, qk_norm="head", qk_norm_key="use_qk_norm", shares_expert=True, routing_bias=True
    ),
    "glm4_moe_lite": _DEEPSEEK,
    "gpt2": Family(
        gated=False,
        grouped_queries=False,
        fused_qkv=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_bias=True,
        tied=True,
        positions_offset=0,
    ),
    "gpt_oss": Family(
        qkv_bias=("attention_bias", True), out_bias=("attention_bias", True), sinks=True, expert_bias=True
    ),
    "gpt_neox": Family(
        gated=False,
        grouped_queries=False,
        fused_qkv=True,
        qkv_bias=("attention_bias", True),
        out_bias=("attention_bias", True),
        mlp_bias=True,
        norm_bias=True,
    ),
    "hunyuan_v1_dense": Family(qk_norm="head"),
    "lfm2": _SHORT_CONVOLUTIONS,
    "lfm2_moe": replace(_SHORT_CONVOLUTIONS, routing_bias=("use_expert_bias", True)),
    "llama4_text": Family(shares_expert=True),
    "nemotron": Family(gated=False, norm_bias=True),
    "olmo": Family(affine_norm=False),
    "olmo2": _FULL_NORMS,
    "olmo3": _FULL_NORMS,
    "olmoe": _FULL_NORMS,
    "opt": Family(
        gated=False,
        grouped_queries=False,
        qkv_bias=("enable_bias", True),
        out_bias=("enable_bias", True),
        mlp_bias=("enable_bias", True),
        norm_bias=True,
        tied=True,
        positions_offset=2,
    ),
    "persimmon": Family(
        gated=False,
        grouped_queries=False,
        fused_qkv=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_bias=True,
        qk_norm="head",
        qk_norm_key="qk_layernorm",
    ),
    "phi": Family(
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        norms=1,
        norm_bias=True,
        qk_norm="head",
        qk_norm_key="qk_layernorm",
    ),
    "phi3": Family(fused_qkv=True, fused_gate_up=True, qkv_bias=False, out_bias=False, mlp_bias=False),
    "qwen2": Family(qkv_bias=True, out_bias=False, mlp_bias=False),
    "qwen2_moe": Family(qkv_bias=("qkv_bias", True), out_bias=False, mlp_bias=False),
    "qwen3": Family(qk_norm="head"),
    "qwen3_5_moe_text": _GATED_QUERIES,
    "qwen3_5_text": _GATED_QUERIES,
    "qwen3_moe": Family(qk_norm="head"),
    "qwen3_next": _GATED_QUERIES,
    "seed_oss": Family(qkv_bias=("attention_bias", True), out_bias=("attention_out_bias", False)),
    "smollm3": Family(tied=True),
    "stablelm": Family(
        qkv_bias=("use_qkv_bias", False),
        out_bias=False,
        norm_bias=True,
        shares_norm=_parallel_residual,
        qk_norm="heads",
        qk_norm_key="qk_layernorm",
    ),
    "starcoder2": Family(
        gated=False,
        qkv_bias=("use_bias", True),
        out_bias=("use_bias", True),
        mlp_bias=("use_bias", True),
        norm_bias=True,
        tied=True,
    ),
}


# Numbers that published checkpoints leave to transformers' own defaults.
_UNSAID: dict[str, dict[str, int]] = {
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "falcon": {"max_position_embeddings": 2048},
    "qwen3_next": {"head_dim": 256, "num_key_value_heads": 2},
    "qwen3_5_moe_text": {"head_dim": 256, "num_key_value_heads": 2},
    "qwen3_5_text": {"head_dim": 256, "num_key_value_heads": 4},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
_DECODER_LAYERS = {
    **dict.fromkeys(("bloom", "falcon", "gpt2"), "transformer.h"),
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
}
_MIXER = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj", "out_proj")
_ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
_GATED = ("gate_proj", "up_proj", "down_proj")
_NEOX_MLP = {"up_proj": "mlp.dense_h_to_4h", "down_proj": "mlp.dense_4h_to_h"}
_BLOOM = {"qkv_proj": "self_attention.query_key_value", "o_proj": "self_attention.dense"} | _NEOX_MLP
_LFM2 = {
    "o_proj": "self_attn.out_proj",
    **{name: f"conv.{name}" for name in ("in_proj", "out_proj")},
    **{name: f"feed_forward.{w}" for name, w in zip(_GATED, ("w1", "w3", "w2"), strict=True)},
}
_SHARED_EXPERTS = {f"shared_expert.{name}": f"mlp.shared_experts.{name}" for name in _GATED}
# Where families call their linears otherwise than Llama: our name -> path in the layer.
_PATHS: dict[str, dict[str, str]] = {
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _SHARED_EXPERTS),
    "gpt2": {"qkv_proj": "attn.c_attn", "o_proj": "attn.c_proj", "up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
    "gpt_neox": {"qkv_proj": "attention.query_key_value", "o_proj": "attention.dense"} | _NEOX_MLP,
    "llama4_text": {name: f"feed_forward.{name}" for name in (*_GATED, *(f"shared_expert.{each}" for each in _GATED))},
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "opt": {"o_proj": "self_attn.out_proj", "up_proj": "fc1", "down_proj": "fc2"},
    "persimmon": {"qkv_proj": "self_attn.query_key_value", "o_proj": "self_attn.dense"} | _NEOX_MLP,
    "phi": {"o_proj": "self_attn.dense", "up_proj": "mlp.fc1", "down_proj": "mlp.fc2"},
    "starcoder2": {"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
}


def linear_path(model_type: str, layer: int, name: str) -> str:
    """The path of a linear in the model that transformers builds, as `model.layers.0.self_attn.q_proj`: what checkpoints name it by."""
    part = "self_attn" if name in _ATTENTION else "linear_attn" if name in _MIXER else "mlp"
    within = _PATHS.get(model_type, {}).get(name, f"{part}.{name}")
    return f"{_DECODER_LAYERS.get(model_type, 'model.layers')}.{layer}.{within}"


_EXPERT_PATHS = {"gate": "mlp.experts.0.gate_proj", "up": "mlp.experts.0.up_proj", "down": "mlp.experts.0.down_proj"}
_MIXTRAL_EXPERTS = {
    name: f"block_sparse_moe.experts.0.{w}" for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


def expert_path(model_type: str, layer: int, name: str) -> str:
    """The path of the first expert's linear in checkpoints that hold experts apart; `name`: `experts.gate`, `experts.up` or `experts.down`."""
    paths = _MIXTRAL_EXPERTS if model_type == "mixtral" else _EXPERT_PATHS
    return f"model.layers.{layer}.{paths[name.removeprefix('experts.')]}"


def unsaid(model_type: str) -> dict[str, int]:
    """The fields that config.json of this type may leave out."""
    return _UNSAID.get(model_type, {})


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, _LLAMA)


def flag(config: dict[str, Any], value: Flag) -> bool:
    return value if isinstance(value, bool) else bool(config.get(*value))
