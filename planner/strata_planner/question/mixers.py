"""Layers that are no attention and keep state of a sequence: what they hold, read from config.json.

Called by `model` alone. Knows their linears and what stays in the compute type beside them; MLPs and norms are those of any layer.
"""

from collections.abc import Mapping
from typing import Any

from strata_planner.contract.sequence_state import SequenceState, states_of
from strata_planner.contract.values import ContractError
from strata_planner.errors import ModelError

Projection = tuple[str, int, int]  # name, out_features, in_features
_KEPT = frozenset({"in_proj_ba", "in_proj_b", "in_proj_a"})
_SPLIT = frozenset({"qwen3_5_moe_text", "qwen3_5_text"})  # families whose queries, gates and decays are projected apart


def read_states(config: Mapping[str, Any]) -> tuple[SequenceState | None, ...]:
    """Of each layer. Raises ModelError."""
    try:
        return states_of(config)
    except ContractError as error:
        raise ModelError(str(error)) from error


def projections(model_type: str, state: SequenceState, hidden: int) -> tuple[Projection, ...]:
    """Of one layer with this state."""
    if not state.heads:  # a short convolution, gated before and after
        return (("in_proj", 3 * hidden, hidden), ("out_proj", hidden, hidden))
    values = state.heads * state.value_dim
    last = ("out_proj", hidden, values)
    if model_type in _SPLIT:
        apart = (
            ("in_proj_qkv", state.channels),
            ("in_proj_z", values),
            ("in_proj_b", state.heads),
            ("in_proj_a", state.heads),
        )
        return (*((name, outputs, hidden) for name, outputs in apart), last)
    return (("in_proj_qkvz", state.channels + values, hidden), ("in_proj_ba", 2 * state.heads, hidden), last)


def is_quantizable(name: str) -> bool:
    """What says how fast a state decays, and how much of a token it learns, stays in the compute type: a rounding of it adds up over the text."""
    return name not in _KEPT


def other_parameters(state: SequenceState, *, bias: bool) -> int:
    """The convolution; of a linear attention how fast each head decays, in two values, and the norm of what it gives."""
    convolution = state.channels * (state.inputs + 1 + bias)
    return convolution + (2 * state.heads + state.value_dim if state.heads else 0)


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
