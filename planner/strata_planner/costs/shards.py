"""A layer cut for tensor parallelism, as each device of a group holds it.

Called by the search for groups of more than one device. Megatron's cut: queries, keys, values and the MLP's first half by
outputs (whole heads), the attention's output and the MLP's second half by inputs; norms and routers are whole everywhere, as are latent keys and values and what
they are made by. Layers with state are cut by their heads, or channels. Of experts each device has whole ones; what that comes to is counted as a part of each,
which is as many bytes. Where shares are unlike, what each device has is what the runtime deals it (`contract.shares`).
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import msgspec

from strata_planner.contract import shares as dealing
from strata_planner.contract.architectures import ROUTING
from strata_planner.contract.shares import Range, Shares
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.linear import Linear
from strata_planner.question.mixers import of_channels_and_heads, outputs_of
from strata_planner.question.model import LayerShape, Model

_OF_QUERIES = ("q_proj", "q_b_proj", "kv_b_proj")  # of latent keys and values each query head makes its own
_OF_KEYS = ("k_proj", "v_proj")
_WHOLE = (*ROUTING, "q_a_proj", "kv_a_proj_with_mqa")
_BY_INPUTS = ("down_proj", "experts.down", "shared_expert.down_proj")


class Portion(NamedTuple):
    """What the device `rank` of a group holds of a layer; of equal `shares` the first one's, which is the largest."""

    shares: Shares
    rank: int = 0

    @property
    def degree(self) -> int:
        return len(self.shares)

    @property
    def is_even(self) -> bool:
        return len(set(self.shares)) == 1

    def of(self, count: int) -> int:
        """Of things that are dealt one by one."""
        return _length(dealing.part(count, self.shares, self.rank))

    def columns(self, width: int) -> int:
        """Of an MLP."""
        return _length(dealing.columns(width, self.shares, self.rank))

    def fraction(self, vocabulary: int) -> float:
        """Of a table that is split by vocabulary."""
        return _length(dealing.vocabulary(vocabulary, self.shares, self.rank)) / vocabulary

    def rows(self, vocabulary: int, size_bytes: int) -> int:
        """Bytes of tables that are split by vocabulary, as in Megatron."""
        own = _length(dealing.vocabulary(vocabulary, self.shares, self.rank))
        return -(-size_bytes * own // vocabulary)


ALL = Portion((1,))


@cache
def even(degree: int) -> Portion:
    """Of one of so many equal devices."""
    return Portion(dealing.equal(degree))


def portions(degree: int, shares: Shares) -> tuple[Portion, ...]:
    """Of each device of a group."""
    return tuple(Portion(shares, rank) for rank in range(degree)) if shares else (even(degree),) * degree


def portion_on(group: DeviceGroup) -> Portion:
    """Of the device that it looks at."""
    return Portion(group.shares, group.rank) if group.shares else even(group.degree)


def sharded(layer: LayerShape, degree: int) -> LayerShape:
    """The share of one of `degree` equal devices, the largest where it does not divide."""
    return portion_of(layer, even(degree))


@cache
def portion_of(layer: LayerShape, portion: Portion) -> LayerShape:
    """Queries go with their key heads."""
    if portion.degree == 1:
        return layer
    keys, queries = _heads(layer, portion)
    elsewhere = layer.heads - _length(queries), layer.kv_heads - _length(keys)
    state, others = layer.state, layer.other_parameters - elsewhere[0] * layer.of_query - elsewhere[1] * layer.of_key
    if state:
        bias = layer.linears[0].bias  # the convolution has one where what leads to it has
        whole, state = state, state.part(portion.shares, portion.rank)
        others -= of_channels_and_heads(whole, bias=bias) - of_channels_and_heads(state, bias=bias)
    return msgspec.structs.replace(
        layer,
        heads=_length(queries),
        kv_heads=_length(keys),
        linears=tuple(_cut(linear, layer, portion) for linear in layer.linears),
        other_parameters=others,
        state=state,
        part_of=layer,
        ranks=portion.degree if portion.is_even else 0,
    )


def _cut(linear: Linear, layer: LayerShape, portion: Portion) -> Linear:
    if linear.name in _WHOLE:
        return linear
    if linear.copies > 1:
        return _of_experts(linear, portion)
    inputs = _inputs(linear, layer, portion)
    if inputs is None:
        return msgspec.structs.replace(linear, out_features=_outputs(linear, layer, portion))
    return _by_inputs(linear, portion, inputs)


def _inputs(linear: Linear, layer: LayerShape, portion: Portion) -> Range | None:
    """None: it is cut by outputs."""
    (shares, rank), state = portion, layer.state
    if linear.name == "o_proj":
        return _scaled(_heads(layer, portion)[1], linear.in_features // layer.heads)
    if linear.name == "out_proj" and state and state.heads:
        return _scaled(dealing.query_heads(state.heads, state.key_heads, shares, rank), state.value_dim)
    if linear.name in {*_BY_INPUTS, "out_proj"}:
        return dealing.columns(linear.in_features, shares, rank)
    return None


def _outputs(linear: Linear, layer: LayerShape, portion: Portion) -> int:
    name, outputs, state = linear.name, linear.out_features, layer.state
    keys, queries = map(_length, _heads(layer, portion))
    if name in _OF_QUERIES:
        return queries * (outputs // layer.heads)
    if name in _OF_KEYS:
        return keys * layer.head_dim
    if name == "qkv_proj":
        return (queries + 2 * keys) * layer.head_dim
    if name == "gate_up_proj":
        return 2 * portion.columns(outputs // 2)
    of_state = outputs_of(name, state.part(portion.shares, portion.rank)) if state else 0
    return of_state or portion.columns(outputs)


def _by_inputs(linear: Linear, portion: Portion, own: Range) -> Linear:
    """What is added up has its bias once, from the first device."""
    inputs = (*own, linear.in_features)
    bias = linear.bias and not portion.rank
    return msgspec.structs.replace(linear, in_features=_length(own), bias=bias, inputs=inputs)


def _of_experts(linear: Linear, portion: Portion) -> Linear:
    """Whole ones, as a part of each: tokens of a step go to all."""
    held = portion.of(linear.copies)
    cut = "in_features" if linear.name in _BY_INPUTS else "out_features"
    part = -(-getattr(linear, cut) * held // linear.copies)
    return msgspec.structs.replace(linear, **{cut: part}, part_of=linear, held=held)


def _heads(layer: LayerShape, portion: Portion) -> tuple[Range, Range]:
    """Key heads and query heads."""
    if layer.state:
        return (0, 0), (0, 0)
    (shares, rank), keys = portion, layer.kv_heads
    return dealing.key_heads(keys, shares, rank), dealing.query_heads(layer.heads, keys, shares, rank)


def _scaled(part: Range, by: int) -> Range:
    return part[0] * by, part[1] * by


def _length(part: Range) -> int:
    return part[1] - part[0]


def divisible(model: Model, degree: int) -> bool:
    """Whether whole heads, and whole experts, can be dealt to `degree` devices evenly; keys and values may be held more than once."""
    return degree == 1 or (
        shareable(model, degree) and all(_divides(*_counts(layer), degree) for layer in set(model.layers))
    )


def equal_shares(model: Model, degree: int) -> Shares:
    """Of `degree` equal devices; none where whole heads come out even, so that each of them is the first one's equal."""
    return () if divisible(model, degree) else dealing.equal(degree)


def degrees_of(model: Model, wished: Iterable[int]) -> dict[int, Shares]:
    """How many of the wished numbers of equal devices can share a stage, falling, with their shares."""
    able = (degree for degree in wished if degree == 1 or shareable(model, degree))
    return {degree: equal_shares(model, degree) for degree in sorted(able, reverse=True)}


def shareable(model: Model, degree: int) -> bool:
    """Whether `degree` devices can have unlike shares of its layers: a head, or channel, and an expert for each at the least."""
    return all(
        _counts(layer)[0] >= degree and all(linear.copies == 1 or linear.copies >= degree for linear in layer.linears)
        for layer in set(model.layers)
    )


def _counts(layer: LayerShape) -> tuple[int, int]:
    """What is dealt of a layer's first half: query heads, or value heads of a linear attention, and the key heads that they go with; or channels."""
    if layer.state is None:
        return layer.heads, layer.kv_heads
    return layer.state.heads or layer.state.channels, layer.state.key_heads or layer.state.channels


def _divides(heads: int, keys: int, degree: int) -> bool:
    return heads % degree == 0 and (keys % degree == 0 or degree % keys == 0)
