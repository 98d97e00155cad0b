"""What a stage of several devices can share: every model that runs, but for some ways to store it, decided from config.json alone.

Called where a plan with such stages is asked for, so that nobody loads a model to hear that it cannot be cut; slots find the same out of its weights.
"""

from typing import Any

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import ANY_PRECISION, GPTQ, GROUP_SIZES, FormatName
from strata_planner.contract.quantization import Quantization, read_quantization
from strata_planner.contract.sequence_state import states_of
from strata_planner.contract.text_part import text_part

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
    """Raises UnsupportedModelError for a (supported) model whose weights lie so that several devices cannot share them."""
    if _is_ordered(config):
        raise UnsupportedModelError(
            "inputs that are grouped in an order of their own (desc_act) are not cut over several devices: use placement.tensorParallel [1]"
        )


def check_groups(config: dict[str, Any], bits: int) -> None:
    """Raises UnsupportedModelError for a model whose weights in groups of 3 or 4 bits are not cut between its heads."""
    width = next((each for each in _head_widths(text_part(config)) if each % GROUP_SIZES[-1]), 0)
    if width:
        raise UnsupportedModelError(
            f"groups of {bits} bits are not cut over several devices where heads are {width} wide, no multiple of {GROUP_SIZES[-1]}: use "
            "precision.method anyPrecision, allow 8 and 16 bits alone, or use placement.tensorParallel [1]"
        )


def _head_widths(part: dict[str, Any]) -> tuple[int, ...]:
    """Of what each head gives to the projection behind it, in attention and in linear attention. `part`: of the language model."""
    width = part.get("head_dim") or part["hidden_size"] // part["num_attention_heads"]
    if part.get("kv_lora_rank"):
        width = part["v_head_dim"]
    states = {each.value_dim for each in states_of(part) if each is not None and each.heads}
    return (width, *states)


def _is_ordered(config: dict[str, Any]) -> bool:
    """Whether its checkpoint is GPTQ's with act-order."""
    quantization = read_quantization(config)
    return isinstance(quantization, Quantization) and quantization.desc_act and not quantization.static_groups
