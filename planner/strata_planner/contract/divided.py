"""Which models a stage of several devices can share, decided from config.json alone.

Called where a plan with such stages is asked for, so that nobody loads a model to hear that it cannot be cut; slots find the same out of the modules
themselves. The table is exactly what the law of ranks covers (docs/ranks.md).
"""

from typing import Any

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import ANY_PRECISION, GPTQ, GROUP_SIZES, FormatName
from strata_planner.contract.quantization import Quantization, read_quantization
from strata_planner.contract.text_part import text_part

DIVIDED = frozenset(
    {
        "apertus",
        "arcee",
        "bloom",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "llama4_text",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
# In which the weights of such a stage can be stored. Not those whose activations are rounded by scales that no rank can tell the others.
DIVIDED_FORMATS: tuple[FormatName, ...] = (
    "dense",
    "int8",
    "w8a8",
    "w8a8_static",
    "int4",
    "int3",
    "fp8_e4m3",
    *ANY_PRECISION.values(),
    *GPTQ.values(),
    "fp8_block",
)


def check_divided(config: dict[str, Any]) -> None:
    """Raises UnsupportedModelError for a (supported) model of which it is not known how several devices share its layers."""
    part = text_part(config)
    model_type = str(part.get("model_type"))
    lacking = ""
    if model_type not in DIVIDED:
        lacking = f"how the layers of '{model_type}' are cut over several devices is not known"
    elif _is_ordered(config):
        lacking = "inputs that are grouped in an order of their own (desc_act) are not cut over several devices"
    if lacking:
        raise UnsupportedModelError(f"{lacking}: use placement.tensorParallel [1]")


def check_groups(config: dict[str, Any], bits: int) -> None:
    """Raises UnsupportedModelError for a model whose weights in groups of 3 or 4 bits are not cut between its heads."""
    part = text_part(config)
    width = part.get("head_dim") or part["hidden_size"] // part["num_attention_heads"]
    if width % GROUP_SIZES[-1]:
        raise UnsupportedModelError(
            f"groups of {bits} bits are not cut over several devices where heads are {width} wide, no multiple of {GROUP_SIZES[-1]}: use "
            "precision.method anyPrecision, allow 8 and 16 bits alone, or use placement.tensorParallel [1]"
        )


def _is_ordered(config: dict[str, Any]) -> bool:
    """Whether its checkpoint is GPTQ's with act-order."""
    quantization = read_quantization(config)
    return isinstance(quantization, Quantization) and quantization.desc_act and not quantization.static_groups
