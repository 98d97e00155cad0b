"""Linears that one rank multiplies by and others hold: taken apart into tensors that all ranks see, and put together again by whoever needs one.

Used by `shared_layers`. Of 16 and 32 bits, and of 8 with a scale for each output.
"""

from torch import Tensor, nn

from strata_runtime.formats.rounded.rounded_linear import ChannelLinear, PackedChannelLinear
from strata_runtime.formats.weights import ChannelWeight
from strata_runtime.kernels.native_dense import PackedWeight
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.ranks.shared_weights import Placed, PlacedLinear, SharedWeights


def tensors_of(linear: nn.Module) -> tuple[str, list[Tensor]] | None:
    """The kind of a linear and the tensors of its weight; None: of one that is not shared."""
    match linear:
        case PackedChannelLinear():
            return "packed 8", [linear.get_buffer("codes"), linear.get_buffer("scales")]
        case BlockedLinear() if linear.packed is not None:
            return "packed 16", [linear.packed.values]
    if type(linear) is ChannelLinear and linear.format == "int8":
        return "8", [linear.codes, linear.scales]
    if type(linear) is nn.Linear:
        return "plain", [linear.weight.data]
    return None


def placed(linear: nn.Module, weights: SharedWeights, key: str) -> nn.Module:
    """The same linear with its weight where all ranks see it, named `key` there."""
    found = tensors_of(linear)
    assert found is not None, key
    kind, tensors = found
    bias: Tensor | None = getattr(linear, "bias", None)
    lie: list[Placed] = []
    copies: list[Tensor] = []
    for tensor in tensors:
        place, copy = weights.place(tensor)
        lie.append(place)
        copies.append(copy)
    of_bias = None if bias is None else weights.place(bias)[0]
    out_features, in_features = int(linear.out_features), int(linear.in_features)  # type: ignore[arg-type]
    weights.add(key, PlacedLinear(kind, out_features, in_features, tuple(lie), of_bias))
    return _made(kind, (out_features, in_features), copies, bias)


def of_rank(weights: SharedWeights, rank: int, key: str) -> nn.Module | None:
    """The linear of any rank; None: it shows none."""
    told = weights.of(rank, key)
    if told is None:
        return None
    tensors = [weights.tensor(rank, each) for each in told.tensors]
    bias = None if told.bias is None else weights.tensor(rank, told.bias)
    return _made(told.kind, (told.out_features, told.in_features), tensors, bias)


def _made(kind: str, shape: tuple[int, int], tensors: list[Tensor], bias: Tensor | None) -> nn.Module:
    match kind:
        case "packed 16":
            return BlockedLinear(PackedWeight(tensors[0], *shape), bias)
        case "packed 8":
            return PackedChannelLinear(PackedWeight(tensors[0], *shape, tensors[1]), bias)
        case "8":
            return ChannelLinear(ChannelWeight(*tensors), bias, "int8")
    linear = nn.Linear(shape[1], shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(tensors[0], requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
