"""Tiny random models of every supported architecture, for the parity tests of loading and of the engine.

Each entry overrides the fields of the architecture's configuration that make it small: six layers for three stages, grouped
queries where it has them, and whatever is peculiar to it (windows, soft caps, partial rotation, multipliers) switched on.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from strata_planner.contract.text_part import text_part
from strata_runtime.model.linears import use_plain_linears
from strata_runtime.model.random_model import make_random_model, whole_model_class
from tests.laws import swept

_made = tempfile.TemporaryDirectory(prefix="strata-tiny-models-")
_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: dict[str, Any] = {"head_dim": 8}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_WINDOW: dict[str, Any] = {"sliding_window": 5, "layer_types": _SLIDING}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
} | _ROUTED
_GATED_DELTA: dict[str, Any] = _HEADS | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
}
_FALCON = _TIED | {"ffn_hidden_size": 48, "intermediate_size": None, "num_key_value_heads": None}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bloom": _TIED | {"num_key_value_heads": 4, "intermediate_size": None},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": _WINDOW | {"logit_scale": 0.25},
    "deepseek_v3": _LATENT,
    "ernie4_5": _HEADS,
    "exaone4": _WINDOW,
    "falcon": _FALCON,
    "gemma": _HEADS | _TIED,
    "gemma2": _HEADS | _TIED | _WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": _HEADS | _TIED | _WINDOW,
    "glm": _HEADS | {"attention_bias": True},
    "glm4": _HEADS | {"attention_bias": True},
    "glm4_moe": _HEADS | _ROUTED | {"use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": _LATENT,
    "gpt2": _TIED | {"n_inner": 48, "intermediate_size": None, "num_key_value_heads": None},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": _HEADS | _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "lfm2_moe": _EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"] * 2},
    "lfm2": {"conv_L_cache": 4, "block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"] * 2},
    "llama": {},
    "llama4_text": _HEADS
    | {
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 5,
        "floor_scale": 4,
    },
    "ministral": _HEADS | _WINDOW,
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "nemotron": {},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "opt": {"ffn_dim": 48, "num_key_value_heads": 4, "word_embed_proj_dim": 16, "do_layer_norm_before": False} | _TIED,
    "persimmon": {"num_key_value_heads": 4},
    "phi": {"num_key_value_heads": 2},
    "phi3": {"sliding_window": 5},
    "qwen2": _TIED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    "qwen3": _HEADS,
    "qwen3_5_moe_text": _GATED_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_moe": _HEADS | _EXPERTS,
    "qwen3_next": _GATED_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    "seed_oss": _HEADS,
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": 5},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-bias": (
        "lfm2",
        {"conv_bias": True, "block_auto_adjust_ff_dim": False, "layer_types": ["conv"] * 5 + ["full_attention"]}
        | _TIED,
    ),
    "llama-tied-bias": ("llama", _TIED | {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "deepseek_v3-one-query": (
        "deepseek_v3",
        _LATENT | {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": _YARN | {"mscale_all_dim": 1.0}},
    ),
    "falcon-new-decoder": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-in-turn": ("falcon", _FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}),
    "opt-norm-before": ("opt", {"ffn_dim": 48, "num_key_value_heads": 4} | _TIED),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "gpt_neox-sequential": ("gpt_neox", {"num_key_value_heads": 4, "use_parallel_residual": False}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, fields) for name, fields in ARCHITECTURES.items()
} | VARIANTS
# Of these the text part runs. Their fields are those of that part.
WITH_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", _HEADS | _TIED | _WINDOW),
    "llama4": ("llama4", _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 5}),
    "mistral3": ("mistral3", {"sliding_window": None}),
    "qwen3_5": ("qwen3_5", _GATED_DELTA),
    "qwen3_5_moe": ("qwen3_5_moe", _GATED_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 24}),
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# One of each kind: plain; soft caps, windows and a tied head; learned positions; experts; fused projections; a parallel block; a scaled head; multipliers; state.
REPRESENTATIVE = ("llama", "gemma2", "opt", "qwen2_moe", "phi3", "gpt_neox", "cohere2", "granite", "qwen3_next")
ALL = MODELS | WITH_VISION
SWEEP = swept(ALL, REPRESENTATIVE)
# Where the sweep above has shown that each kind computes.
SHORT_SWEEP = swept(ALL, ("gemma2", "qwen2_moe", "qwen3_next"))


def tiny_config(name: str, **config: Any) -> tuple[str, dict[str, Any]]:
    """Type and fields of the tiny model `name` of ALL; `config` overrides its fields."""
    model_type, fields = ALL[name]
    merged = _BASE | fields | config
    if model_type == "opt" and "word_embed_proj_dim" not in merged:
        merged["word_embed_proj_dim"] = merged["hidden_size"]
    if name not in WITH_VISION:
        return model_type, merged
    tied = {"tie_word_embeddings": merged["tie_word_embeddings"]}
    return model_type, {"text_config": text_part({"model_type": model_type, "text_config": merged})} | tied | {
        "vision_config": _VISION
    }


def make_tiny_model(folder: Path, name: str, **config: Any) -> Path:
    """Write the tiny model `name` of ALL to `folder`; `config` overrides its fields. The same is made once and copied."""
    made = Path(_made.name) / hashlib.sha256(repr((name, sorted(config.items()))).encode()).hexdigest()
    if not made.exists():
        model_type, fields = tiny_config(name, **config)
        make_random_model(made, model_type, **fields)
    return Path(shutil.copytree(made, folder, dirs_exist_ok=True))


def on_meta(config: Any) -> nn.Module:
    """The language model alone, without weights, its linears as the runtime has them."""
    text = config.get_text_config()
    with torch.device("meta"):
        model: nn.Module = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)](text)
    use_plain_linears(model)
    return model


def unsliced(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """transformers' own model of the checkpoint, whole."""
    kind = whole_model_class(AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, dtype=dtype, **settings)
