"""Which models Strata can run, decided from config.json alone.

Called by the planner before it reads a model's shapes and by the runtime before it loads one, so that both say the same.
The table is exactly what the parity tests cover (docs/architectures.md). Knows no tensors and no transformers.
"""

import difflib
from dataclasses import dataclass
from typing import Any

from strata_planner.contract.formats import WITHOUT_EXPERTS, FormatName
from strata_planner.contract.text_part import text_part
from strata_planner.contract.values import ContractError


class UnsupportedModelError(ContractError):
    """The engine lacks something that this model needs. Choose another model; retrying does not help."""


@dataclass(frozen=True)
class Architecture:
    """What varies between the decoder-only models that the engine runs.

    `windows`, `chunks`: its attention layers take a sliding window, or see their own chunk of positions. `fused_experts`: the experts of a layer are 3-D parameters,
    which have no form in the formats of `WITHOUT_EXPERTS`. `mixer`: the type, among `layer_types`, of layers that are no attention and keep
    state of a sequence (`sequence_state`).
    """

    windows: bool = False
    chunks: bool = False
    fused_experts: bool = False
    mixer: str = ""


ROUTING = ("shared_expert_gate",)  # linears that weigh experts: their weights stay in the compute type

_PLAIN = Architecture()
_WINDOWS = Architecture(windows=True)
_EXPERTS = Architecture(fused_experts=True)

SUPPORTED: dict[str, Architecture] = {
    "apertus": _PLAIN,
    "arcee": _PLAIN,
    "bloom": _PLAIN,
    "cohere": _PLAIN,
    "cohere2": _WINDOWS,
    "deepseek_v3": _EXPERTS,
    "ernie4_5": _PLAIN,
    "exaone4": _WINDOWS,
    "falcon": _PLAIN,
    "gemma": _PLAIN,
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "glm": _PLAIN,
    "glm4": _PLAIN,
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": _EXPERTS,
    "gpt2": _PLAIN,
    "gpt_neox": _PLAIN,
    "gpt_oss": Architecture(windows=True, fused_experts=True),
    "granite": _PLAIN,
    "granitemoe": _EXPERTS,
    "helium": _PLAIN,
    "hunyuan_v1_dense": _PLAIN,
    "lfm2": Architecture(mixer="conv"),
    "lfm2_moe": Architecture(fused_experts=True, mixer="conv"),
    "llama": _PLAIN,
    "llama4_text": Architecture(chunks=True, fused_experts=True),
    "ministral": _WINDOWS,
    "mistral": _WINDOWS,
    "mixtral": Architecture(windows=True, fused_experts=True),
    "nemotron": _PLAIN,
    "olmo": _PLAIN,
    "olmo2": _PLAIN,
    "olmo3": _WINDOWS,
    "olmoe": _EXPERTS,
    "opt": _PLAIN,
    "persimmon": _PLAIN,
    "phi": _PLAIN,
    "phi3": _WINDOWS,
    "qwen2": _WINDOWS,
    "qwen2_moe": _EXPERTS,
    "qwen3": _WINDOWS,
    "qwen3_5_moe_text": Architecture(fused_experts=True, mixer="linear_attention"),
    "qwen3_5_text": Architecture(mixer="linear_attention"),
    "qwen3_moe": Architecture(windows=True, fused_experts=True),
    "qwen3_next": Architecture(fused_experts=True, mixer="linear_attention"),
    "seed_oss": _PLAIN,
    "smollm3": _WINDOWS,
    "stablelm": _PLAIN,
    "starcoder2": _WINDOWS,
}

# What else may be asked for: what the engine lacks to run it, and the supported type that is nearest to it.
_LACKING: dict[str, tuple[str, str]] = {
    "deepseek_v2": ("multi-head latent attention other than DeepSeek-V3's", "deepseek_v3"),
    "falcon_h1": ("state-space layers", "falcon"),
    "falcon_mamba": ("state-space layers", "falcon"),
    "gptj": ("attention outside transformers' attention interface", "gpt_neox"),
    "jamba": ("state-space layers", "mixtral"),
    "kimi_linear": ("linear attention other than Gated DeltaNet's", "qwen3_next"),
    "mamba": ("state-space layers", "llama"),
    "mamba2": ("state-space layers", "llama"),
    "minimax": ("linear attention other than Gated DeltaNet's", "qwen3_next"),
    "mpt": ("ALiBi position biases", "bloom"),
    "olmo_hybrid": ("a tested adapter for its linear attention", "qwen3_next"),
    "recurrent_gemma": ("recurrent layers", "gemma"),
    "rwkv": ("recurrent layers", "llama"),
    "zamba2": ("state-space layers", "llama"),
}
_OTHER_MODALITIES = ("vision_config", "audio_config", "speech_config", "vision_tower", "mm_vision_tower")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# These rescale the rotary table by the longest sequence of a batch, so that one sequence would change another's text.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")


def check_architecture(config: dict[str, Any]) -> None:
    """Raises UnsupportedModelError, naming `model_type` and everything the engine lacks, unless it can run the model.

    `config`: the parsed config.json. Only what it says is checked, not whether the weights are there.
    """
    config = text_part(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModelError("config.json has no model_type: a Hugging Face decoder-only checkpoint is needed")
    lacking = _lacking(model_type, config)
    if lacking:
        others = "" if model_type in SUPPORTED else f"{_nearest(model_type)}. Supported: {', '.join(sorted(SUPPORTED))}"
        raise UnsupportedModelError(
            f"model_type '{model_type}'{' as this model has it' * (not others)} is not supported: the engine lacks {', '.join(lacking)}{others}"
        )


def check_formats(config: dict[str, Any], formats: tuple[FormatName, ...]) -> None:
    """Raises UnsupportedModelError for a layer format that this (supported) model's layers cannot be stored in."""
    model_type = str(text_part(config).get("model_type"))
    refused = sorted(set(formats) - set(layer_formats(config, formats)))
    if refused:
        raise UnsupportedModelError(
            f"model_type '{model_type}' has fused experts, which are stored as they are or rounded to nearest: {', '.join(refused)} "
            "cannot hold its layers. Take the method roundToNearest or float8, or 16 bits"
        )


def check_without_experts(config: dict[str, Any], what: str) -> None:
    """Raises UnsupportedModelError for a model with fused experts: `what` (a noun) goes through a model's linears alone."""
    model_type = str(text_part(config).get("model_type"))
    if SUPPORTED.get(model_type, _PLAIN).fused_experts:
        raise UnsupportedModelError(
            f"model_type '{model_type}' has fused experts, which {what} does not know: its experts may be rounded to nearest "
            "while they load (precision.method roundToNearest), without it"
        )


def layer_formats(config: dict[str, Any], formats: tuple[FormatName, ...]) -> tuple[FormatName, ...]:
    """Those of `formats` that the decoder layers of this model can be stored in."""
    architecture = SUPPORTED.get(str(text_part(config).get("model_type")), _PLAIN)
    return tuple(name for name in formats if not (architecture.fused_experts and name in WITHOUT_EXPERTS))


def mixer_of(model_type: str) -> str:
    """What `layer_types` calls the layers of this model that are no attention and keep state of a sequence; empty: it has none."""
    return SUPPORTED.get(model_type, _PLAIN).mixer


def _nearest(model_type: str) -> str:
    """The supported type to try in its place, as the end of a sentence; empty where none is like it."""
    if model_type in _LACKING:
        return f". The nearest that runs is {_LACKING[model_type][1]}"
    alike = difflib.get_close_matches(model_type, sorted(SUPPORTED), n=1)
    return f". The nearest name that runs is {alike[0]}" if alike else ""


def _lacking(model_type: str, config: dict[str, Any]) -> list[str]:
    """Everything that stands in the way, most telling first."""
    lacking = []
    if config.get("is_encoder_decoder"):
        lacking.append("encoder-decoder models")
    lacking += [f"inputs other than text ({key})" for key in _OTHER_MODALITIES if config.get(key)]
    if model_type in _LACKING:
        lacking.append(_LACKING[model_type][0])
    elif config.get("kv_lora_rank") and model_type not in SUPPORTED:
        lacking.append("multi-head latent attention (kv_lora_rank)")
    if model_type not in SUPPORTED and not lacking:
        lacking.append("a tested adapter for it")
    return lacking + _lacking_attention(model_type, config) + _lacking_storage(config)


def _lacking_attention(model_type: str, config: dict[str, Any]) -> list[str]:
    lacking = []
    if config.get("attn_logit_softcapping") and model_type not in SUPPORTED:
        lacking.append("a tested adapter for its soft caps in attention")
    types = set(config.get("layer_types") or ())
    architecture = SUPPORTED.get(model_type)
    known = {*_LAYER_TYPES, *(("chunked_attention",) if architecture and architecture.chunks else ())}
    known |= {architecture.mixer} if architecture else set()
    lacking += [f"layers of type '{name}'" for name in sorted(types - known)]
    if architecture and not architecture.windows and _uses_window(config, types):
        lacking.append(f"sliding windows in this architecture (sliding_window {config.get('sliding_window')})")
    if config.get("add_cross_attention"):
        lacking.append("cross-attention")
    if config.get("use_bidirectional_attention"):
        lacking.append("bidirectional attention")
    if config.get("alibi"):
        lacking.append("ALiBi position biases")
    lacking += [f"rope type '{name}'" for name in sorted(_rope_types(config) & set(_BATCH_DEPENDENT_ROPE))]
    return lacking


def _uses_window(config: dict[str, Any], types: set[str]) -> bool:
    return bool(config.get("use_sliding_window")) or "sliding_attention" in types


def _rope_types(config: dict[str, Any]) -> set[str]:
    """The rope types named in the old (`rope_scaling`) or new (`rope_parameters`) field, per layer type or for all."""
    found = set()
    for field in ("rope_scaling", "rope_parameters"):
        parameters = config.get(field) or {}
        for each in (parameters, *parameters.values()):
            if isinstance(each, dict):
                found.add(str(each.get("rope_type", each.get("type", "default"))))
    return found


def _lacking_storage(config: dict[str, Any]) -> list[str]:
    quantization = config.get("quantization_config")
    if not quantization:
        return []
    return [
        f"reading weights already quantized by '{quantization.get('quant_method', 'unknown')}' here: give the 16-bit checkpoint"
    ]
