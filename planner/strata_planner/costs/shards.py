"""A layer cut for tensor parallelism, as each device of a group holds it.

Called by the search for groups of more than one device. Megatron's cut: queries, keys, values and the MLP's first half by
outputs (whole heads), the attention's output and the MLP's second half by inputs; norms and routers are whole everywhere. Of experts each device
has whole ones; what that comes to is counted as a part of each, which is as many bytes. Where shares are unlike, what each device has is what the runtime
deals it (`contract.shares`).
"""

from functools import cache
from typing import NamedTuple

import msgspec

from strata_planner.contract import shares as dealing
from strata_planner.contract.shares import Range, Shares
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape, Model

_BY_INPUTS = ("o_proj", "down_proj", "experts.down", "shared_expert.down_proj")


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
        """Of things that are dealt one by one, or are so many that it does not matter."""
        return -(-count // self.degree) if self.is_even else _length(dealing.part(count, self.shares, self.rank))

    def columns(self, width: int) -> int:
        """Of an MLP."""
        return -(-width // self.degree) if self.is_even else _length(dealing.columns(width, self.shares, self.rank))

    def fraction(self, vocabulary: int) -> float:
        """Of a table that is split by vocabulary."""
        if self.is_even:
            return 1 / self.degree
        return _length(dealing.vocabulary(vocabulary, self.shares, self.rank)) / vocabulary

    def rows(self, vocabulary: int, size_bytes: int) -> int:
        """Bytes of tables that are split by vocabulary, as in Megatron."""
        if self.is_even:
            return -(-size_bytes // self.degree)
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
    degree = portion.degree
    if degree == 1:
        return layer
    kv_heads, heads = _heads(layer, portion)
    width = layer.head_dim
    outputs = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
    outputs["qkv_proj"] = (heads + 2 * kv_heads) * width

    def own(linear: Linear, count: int) -> int:
        """Of `count` columns of an MLP, or of one expert's that stand for a part of them all."""
        if linear.copies == 1 or portion.is_even:
            return portion.columns(count)
        return -(-count * portion.of(linear.copies) // linear.copies)

    def cut(linear: Linear) -> Linear:
        if linear.name == "o_proj" and linear.in_features == layer.heads * width:
            return msgspec.structs.replace(linear, in_features=heads * width)
        if linear.name in _BY_INPUTS:
            return msgspec.structs.replace(linear, in_features=own(linear, linear.in_features))
        known = outputs.get(linear.name)
        return msgspec.structs.replace(linear, out_features=known or own(linear, linear.out_features))

    linears = tuple(cut(linear) for linear in layer.linears)
    measured_as = degree if portion.is_even else 0
    return msgspec.structs.replace(
        layer, heads=heads, kv_heads=kv_heads, linears=linears, part_of=layer, ranks=measured_as
    )


def _heads(layer: LayerShape, portion: Portion) -> tuple[int, int]:
    """Key heads and query heads."""
    shares, rank = portion
    if portion.is_even:
        kv_heads = -(-layer.kv_heads // portion.degree)
        alone = portion.degree <= layer.kv_heads
        return kv_heads, kv_heads * layer.heads // layer.kv_heads if alone else -(-layer.heads // portion.degree)
    keys, queries = (
        dealing.key_heads(layer.kv_heads, shares, rank),
        dealing.query_heads(layer.heads, layer.kv_heads, shares, rank),
    )
    return _length(keys), _length(queries)


def _length(part: Range) -> int:
    return part[1] - part[0]


def divisible(model: Model, degree: int) -> bool:
    """Whether whole heads, and whole experts, can be dealt to `degree` devices; keys and values may be held more than once, latents and states are
    not cut.
    """
    return degree == 1 or (
        shareable(model, degree)
        and all(
            layer.heads % degree == 0 and (layer.kv_heads % degree == 0 or degree % layer.kv_heads == 0)
            for layer in set(model.layers)
        )
    )


def shareable(model: Model, degree: int) -> bool:
    """Whether `degree` devices can have unlike shares of its layers: a head and an expert for each at the least."""
    return all(
        layer.heads >= degree
        and not layer.latent
        and not layer.state
        and all(linear.copies == 1 or linear.copies >= degree for linear in layer.linears)
        for layer in set(model.layers)
    )
