"""Which models a stage of several devices can share, decided from config.json alone.

Called where a plan with such stages is asked for, so that nobody loads a model to hear that it cannot be cut; slots find the same out of the modules
themselves. The table is exactly what the law of ranks covers (docs/ranks.md).
"""

from typing import Any

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import ANY_PRECISION, FormatName
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
# In which the weights of such a stage can be stored: of the others, what a row of a weight keeps is not known to be the same when inputs are cut.
DIVIDED_FORMATS: tuple[FormatName, ...] = ("dense", "int8", *ANY_PRECISION.values())


def check_divided(config: dict[str, Any]) -> None:
    """Raises UnsupportedModelError for a (supported) model of which it is not known how several devices share its layers."""
    part = text_part(config)
    model_type = str(part.get("model_type"))
    lacking = ""
    if model_type not in DIVIDED:
        lacking = f"how the layers of '{model_type}' are cut over several devices is not known"
    elif config.get("quantization_config"):
        lacking = "a checkpoint that is quantized already is not cut over several devices"
    if lacking:
        raise UnsupportedModelError(f"{lacking}: use placement.tensorParallel [1]")
