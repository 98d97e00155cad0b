"""A layer cut for tensor parallelism, as each device of a group holds it.

Called by the search for groups of more than one device. Megatron's cut: queries, keys, values and the MLP's first half by
outputs (whole heads), the attention's output and the MLP's second half by inputs; norms and routers are whole everywhere. Of experts each device
has as many as the others, which are as many bytes as a part of each.
"""

from functools import cache

import msgspec

from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape, Model

_BY_INPUTS = ("o_proj", "down_proj", "experts.down", "shared_expert.down_proj")


@cache
def sharded(layer: LayerShape, degree: int) -> LayerShape:
    """The share of one of `degree` devices, the largest where it does not divide: queries go with their key heads."""
    if degree == 1:
        return layer
    kv_heads = -(-layer.kv_heads // degree)
    heads = kv_heads * layer.heads // layer.kv_heads if degree <= layer.kv_heads else -(-layer.heads // degree)
    width = layer.head_dim
    outputs = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
    outputs["qkv_proj"] = (heads + 2 * kv_heads) * width

    def cut(linear: Linear) -> Linear:
        if linear.name == "o_proj" and linear.in_features == layer.heads * width:
            return msgspec.structs.replace(linear, in_features=heads * width)
        if linear.name in _BY_INPUTS:
            return msgspec.structs.replace(linear, in_features=-(-linear.in_features // degree))
        return msgspec.structs.replace(linear, out_features=outputs.get(linear.name, -(-linear.out_features // degree)))

    linears = tuple(cut(linear) for linear in layer.linears)
    return msgspec.structs.replace(layer, heads=heads, kv_heads=kv_heads, linears=linears, part_of=layer, ranks=degree)


def divisible(model: Model, degree: int) -> bool:
    """Whether whole heads, and whole experts, can be dealt to `degree` devices; keys and values may be held more than once, latents and states are
    not cut.
    """
    return degree == 1 or all(
        layer.heads % degree == 0
        and not layer.latent
        and not layer.state
        and all(linear.copies == 1 or linear.copies >= degree for linear in layer.linears)
        and (layer.kv_heads % degree == 0 or degree % layer.kv_heads == 0)
        for layer in set(model.layers)
    )
