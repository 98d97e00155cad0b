"""Layers that are no attention and keep state of a sequence: what they hold, read from config.json.

Called by `model` alone. Knows their linears and what stays in the compute type beside them; MLPs and norms are those of any layer.
"""

from collections.abc import Mapping
from typing import Any

from strata_planner.contract.sequence_state import SequenceState, states_of
from strata_planner.contract.values import ContractError
from strata_planner.errors import ModelError
from strata_planner.question.linear import Linear

_SPLIT = frozenset({"qwen3_5_moe_text", "qwen3_5_text"})  # families whose queries, gates and decays are projected apart


def read_states(config: Mapping[str, Any]) -> tuple[SequenceState | None, ...]:
    """Of each layer. Raises ModelError."""
    try:
        return states_of(config)
    except ContractError as error:
        raise ModelError(str(error)) from error


def projections(config: Mapping[str, Any], state: SequenceState, hidden: int) -> tuple[Linear, ...]:
    """Of one layer with this state. What says how fast a state decays, and how much of a token it learns, stays in the compute type: a rounding
    of it adds up over the text.
    """
    bias = bool(config.get("conv_bias"))

    def projection(name: str, *, quantizable: bool = True) -> Linear:
        return Linear(name, outputs_of(name, state), hidden, bias and not state.heads, quantizable=quantizable)

    if not state.heads:  # a short convolution, gated before and after
        return (projection("in_proj"), Linear("out_proj", hidden, hidden, bias))
    last = Linear("out_proj", hidden, state.heads * state.value_dim)
    if config.get("model_type") in _SPLIT:
        decays = (projection(name, quantizable=False) for name in ("in_proj_b", "in_proj_a"))
        return (projection("in_proj_qkv"), projection("in_proj_z"), *decays, last)
    return (projection("in_proj_qkvz"), projection("in_proj_ba", quantizable=False), last)


def outputs_of(name: str, state: SequenceState) -> int:
    """Of a projection that makes what this state is moved by; 0: it is none."""
    values = state.heads * state.value_dim
    outputs = {
        "in_proj": 3 * state.channels,
        "in_proj_qkv": state.channels,
        "in_proj_z": values,
        "in_proj_qkvz": state.channels + values,
        "in_proj_ba": 2 * state.heads,
    }
    return outputs.get(name, state.heads if name in {"in_proj_b", "in_proj_a"} else 0)


def other_parameters(config: Mapping[str, Any], state: SequenceState) -> int:
    """The convolution and the decays; of a linear attention the norm of what it gives."""
    return of_channels_and_heads(state, bias=bool(config.get("conv_bias"))) + state.value_dim


def of_channels_and_heads(state: SequenceState, *, bias: bool) -> int:
    """The convolution; of a linear attention, whose convolution has no bias, how fast each head decays, in two values."""
    convolution = state.channels * (state.inputs + 1)
    return convolution + (2 * state.heads if state.heads else state.channels * bias)


def convolution_mlp_width(config: Mapping[str, Any], width: int) -> int:
    """Of LFM2's MLP, which config.json gives before it is cut to two thirds and rounded up. Raises ModelError."""
    if config.get("block_auto_adjust_ff_dim") is False:
        return width
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    width = 2 * width // 3
    if factor is None:
        return width
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < 1 << 16 or not multiple:
        raise ModelError(
            f"config.json: block_ffn_dim_multiplier is {factor!r} and block_multiple_of {multiple!r}; numbers above 0 are needed"
        )
    return int(multiple * -(-int(factor * width) // multiple))
