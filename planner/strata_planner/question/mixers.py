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
    if not state.heads:  # a short convolution, gated before and after
        bias = bool(config.get("conv_bias"))
        return (Linear("in_proj", 3 * hidden, hidden, bias), Linear("out_proj", hidden, hidden, bias))
    values = state.heads * state.value_dim
    last = Linear("out_proj", hidden, values)
    if config.get("model_type") in _SPLIT:
        return (
            Linear("in_proj_qkv", state.channels, hidden),
            Linear("in_proj_z", values, hidden),
            *(Linear(name, state.heads, hidden, quantizable=False) for name in ("in_proj_b", "in_proj_a")),
            last,
        )
    decays = Linear("in_proj_ba", 2 * state.heads, hidden, quantizable=False)
    return (Linear("in_proj_qkvz", state.channels + values, hidden), decays, last)


def other_parameters(config: Mapping[str, Any], state: SequenceState) -> int:
    """The convolution; of a linear attention how fast each head decays, in two values, and the norm of what it gives."""
    convolution = state.channels * (state.inputs + 1)
    if state.heads:
        return convolution + 2 * state.heads + state.value_dim
    return convolution + state.channels * bool(config.get("conv_bias"))


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
