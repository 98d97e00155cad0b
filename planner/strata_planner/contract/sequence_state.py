"""What a sequence keeps in a layer that is no attention: the last inputs of a convolution, the matrices of a linear attention.

The planner counts with it and the runtime allocates by it, so that predicted and measured bytes are the same number. Decided from config.json
alone, by both. Such state is of one position: nobody can share it, go back in it or begin in the middle of it.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from strata_planner.contract.architectures import mixer_of
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType
from strata_planner.contract.shares import Range, Shares, columns, key_heads, query_heads
from strata_planner.contract.values import ContractError, Value

_EVERY = 4  # layers of Qwen's models, of which the last is attention


class SequenceState(Value, frozen=True):
    """Of one sequence in one layer: `inputs` rows of `channels` values in the compute type, and of each of `heads` a matrix [key_dim, value_dim]
    in float32.
    """

    channels: int
    inputs: int
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def key_heads(self) -> int:
        """Of a linear attention: each has a query and a key for as many of the `heads`, which have a value each."""
        return (self.channels - self.heads * self.value_dim) // (2 * self.key_dim) if self.heads else 0

    def part(self, shares: Shares, rank: int) -> "SequenceState":
        """Of a rank of those that share the layer: whole heads, with the key heads that they belong to; or channels, in tiles."""
        if not self.heads:
            return structs.replace(self, channels=_length(columns(self.channels, shares, rank)))
        keys = _length(key_heads(self.key_heads, shares, rank))
        heads = _length(query_heads(self.heads, self.key_heads, shares, rank))
        return structs.replace(self, channels=2 * keys * self.key_dim + heads * self.value_dim, heads=heads)

    @property
    def matrix_values(self) -> int:
        return self.heads * self.key_dim * self.value_dim

    def bytes(self, compute_type: ComputeType) -> int:
        inputs = self.channels * self.inputs * COMPUTE_TYPE_BYTES[compute_type]
        return inputs + self.matrix_values * COMPUTE_TYPE_BYTES["float32"]


def keeps_state(model_type: str) -> bool:
    """Whether sequences of such a model keep state beside keys and values: their prefixes are not shared, and nothing is guessed ahead."""
    return bool(mixer_of(model_type))


def states_of(config: Mapping[str, Any]) -> tuple[SequenceState | None, ...]:
    """Of each layer; None: it is attention. `config`: of the language model alone. Raises ContractError for numbers that make no state."""
    mixer, layers = mixer_of(str(config.get("model_type"))), int(config.get("num_hidden_layers") or 0)
    if not mixer:
        return (None,) * layers
    kinds = _layer_kinds(config, mixer, layers)
    if len(kinds) != layers:
        raise ContractError(
            f"config.json: layer_types has {len(kinds)} entries; one for each of {layers} layers is needed"
        )
    state = _STATES[mixer](config)
    return tuple(state if kind == mixer else None for kind in kinds)


def _layer_kinds(config: Mapping[str, Any], mixer: str, layers: int) -> list[str]:
    """As config.json says, or as transformers reads one that does not."""
    if (given := config.get("layer_types")) is not None:
        return list(given)
    if mixer == "conv":
        attention = config.get("full_attn_idxs")
        return ["full_attention" if attention is None or each in attention else mixer for each in range(layers)]
    every = _number(config, "full_attention_interval", _EVERY)
    return [mixer if (each + 1) % every else "full_attention" for each in range(layers)]


def _gated_delta(config: Mapping[str, Any]) -> SequenceState:
    """Of Gated DeltaNet (arXiv 2412.06464) behind a short convolution over queries, keys and values."""
    key_heads, heads = _number(config, "linear_num_key_heads", 16), _number(config, "linear_num_value_heads", 32)
    if heads % key_heads:
        raise ContractError(f"config.json: linear_num_key_heads {key_heads} must divide linear_num_value_heads {heads}")
    key_dim, value_dim = (_number(config, f"linear_{each}_head_dim", 128) for each in ("key", "value"))
    channels = 2 * key_heads * key_dim + heads * value_dim
    return SequenceState(channels, _number(config, "linear_conv_kernel_dim", 4) - 1, heads, key_dim, value_dim)


def _short_convolution(config: Mapping[str, Any]) -> SequenceState:
    return SequenceState(_number(config, "hidden_size", 2560), _number(config, "conv_L_cache", 3) - 1)


def _length(part: Range) -> int:
    return part[1] - part[0]


_STATES = {"linear_attention": _gated_delta, "conv": _short_convolution}


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ContractError(f"config.json: {name} is {value!r}; a whole number of at least 1 is needed")
    return value
