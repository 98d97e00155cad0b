"""Products with weights of 16 bits, or of 8 with a scale per output, in the native library: packed once, then multiplied at any number of tokens by one
kernel.

Called by `loading.blocked` and `formats.rounded`, where `takes`. Knows nothing of modules.
"""

import copy
import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from strata_runtime.kernels.native import library, multiplies_in_avx512
from strata_runtime.kernels.native_calls import DENSE, function, lined_up, product

_PACK_CALL = struct.Struct("7q")  # `PackCall` of kernels/native/dense.cpp
_TOKENS, _WEIGHT, _RESULT = struct.Struct("3q"), struct.Struct("5q"), struct.Struct("3q")  # `DenseCall` of calls.h
_OUTPUTS, _LINE_BYTES = 32, 64  # of a block; of a line of the cache
_MANY_TOKENS = 16  # from which on packing a weight costs less than multiplying it as torch does where it has no instructions for bfloat16
_PLACES = torch.arange(64).view(4, 2, 8).transpose(0, 1).flatten()  # of a pair's int8 values: `place_of` of dense.cpp


@cache
def runs() -> bool:
    """Whether this processor has what the library multiplies bfloat16 with."""
    found = library()
    return found is not None and bool(found.strata_dense_runs())


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library has bfloat16 products for this processor."""
    return device.type == "cpu" and dtype is torch.bfloat16 and runs()


@cache
def onednn_multiplies() -> bool:
    """Whether oneDNN multiplies bfloat16 here. Else torch does so number by number: an eighth of what it does in float32 on processors with AVX2 alone."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001, torch has no public name for it


def alone(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether nothing else here has products of bfloat16 that are worth a call."""
    return multiplies(dtype, device) and not onednn_multiplies()


def takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether they are the fastest for linears: where a processor has tiles of its own for them (AMX), oneDNN uses those, the library does not; and
    oneDNN multiplies bfloat16 in AVX-512 without BF16, too, where the library has AVX2.
    """
    fastest = not onednn_multiplies() or (multiplies_in_avx512() and not torch.cpu._is_amx_tile_supported())  # noqa: SLF001
    return multiplies(dtype, device) and fastest


def multiply_once(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [M, K], weight [N, K] of one type -> [M, N]: of a weight that has just been made and is needed no more."""
    if tokens.shape[0] >= _MANY_TOKENS and alone(tokens.dtype, tokens.device):
        return PackedProduct(pack(weight))(tokens)
    return functional.linear(tokens, weight)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [N, K] as the library multiplies it. `values`: bfloat16, or int8 with `scales` bfloat16 [N]: [blocks of 32 outputs, pairs of columns, 32, 2]."""

    values: Tensor
    out_features: int
    in_features: int
    scales: Tensor | None = None


def fills_blocks(weight: Tensor) -> bool:
    """Whether a weight [N, K] packs into as many values as it has."""
    return weight.shape[0] % _OUTPUTS == 0 and weight.shape[1] % 2 == 0


def pack(weight: Tensor, scales: Tensor | None = None) -> PackedWeight:
    """weight: bfloat16 [N, K], or int8 with `scales` bfloat16 [N]. Its own memory is needed no more."""
    weight = lined_up(weight)
    rows, columns = weight.shape
    values = torch.empty(-(-rows // _OUTPUTS), -(-columns // 2), _OUTPUTS, 2, dtype=weight.dtype)
    assert values.data_ptr() % _LINE_BYTES == 0, "torch's memory begins where a line of the cache does"
    given = (weight.data_ptr(), rows, columns, weight.stride(0), weight.element_size())
    function("strata_dense_pack")(_PACK_CALL.pack(*given, values.data_ptr(), torch.get_num_threads()))
    return PackedWeight(values, rows, columns, None if scales is None else scales.bfloat16().contiguous())


def rows(weight: PackedWeight, numbers: Tensor) -> Tensor:
    """numbers: int64 [M] of outputs -> their rows of the values, [M, K]."""
    values = weight.values if weight.scales is None else weight.values.flatten(2)[..., _PLACES].view_as(weight.values)
    return values[numbers // _OUTPUTS, :, numbers % _OUTPUTS].flatten(1)[:, : weight.in_features]


class PackedProduct:
    """inputs [..., K] -> [..., N]: by a packed weight, plus `bias` [N] if any, all bfloat16. What names the weight in a call is worked out once."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        bias = None if bias is None else bias.contiguous()
        self._held = (weight, bias)
        self._rows, self._columns = weight.out_features, weight.in_features
        at_bias, at_scales = (0 if each is None else each.data_ptr() for each in (bias, weight.scales))
        self._weight = _WEIGHT.pack(weight.values.data_ptr(), self._rows, self._columns, at_bias, at_scales)
        self.numbers = product(DENSE, self._columns, None, self._weight)  # in a layer's call

    def __deepcopy__(self, memo: dict[int, object]) -> "PackedProduct":
        """Of a weight of its own."""
        return PackedProduct(*copy.deepcopy(self._held, memo))

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dtype is not torch.bfloat16 or inputs.shape[-1] != self._columns:
            raise ValueError(f"inputs {inputs.dtype} {list(inputs.shape)} must be bfloat16 [..., {self._columns}]")
        tokens = lined_up(inputs.reshape(-1, self._columns))
        count, rows = tokens.shape[0], self._rows
        out = tokens.new_empty(count, rows)
        numbers = _TOKENS.pack(tokens.data_ptr(), count, tokens.stride(0)) + self._weight
        function("strata_dense_linear")(numbers + _RESULT.pack(out.data_ptr(), rows, torch.get_num_threads()))
        return out.view(*inputs.shape[:-1], rows)
