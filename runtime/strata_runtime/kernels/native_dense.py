"""Products with 16-bit weights in the native library: packed once, then multiplied at any number of tokens by one kernel.

Called by `loading.blocked`, where `takes`. Knows nothing of modules.
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from strata_runtime.kernels.native import library

_PACK_CALL = struct.Struct("6q")  # `PackCall` of kernels/native/dense.cpp
_TOKENS, _WEIGHT, _RESULT = struct.Struct("3q"), struct.Struct("4q"), struct.Struct("3q")  # `DenseCall`
_OUTPUTS = 32  # of a block


@cache
def runs() -> bool:
    """Whether this processor has what the library multiplies bfloat16 with."""
    found = library()
    return found is not None and bool(found.strata_dense_runs())


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library has bfloat16 products for this processor."""
    return device.type == "cpu" and dtype is torch.bfloat16 and runs()


def takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether they are the fastest for linears: where a processor has tiles of its own for them (AMX), oneDNN uses those, the library does not."""
    return multiplies(dtype, device) and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [N, K] as the library multiplies it. `values`: bfloat16 [blocks of 32 outputs, pairs of columns, 32, 2]."""

    values: Tensor
    out_features: int
    in_features: int


def pack(weight: Tensor) -> PackedWeight:
    """weight: bfloat16 [N, K]; its own memory is needed no more."""
    weight = _lined_up(weight)
    rows, columns = weight.shape
    values = _aligned(-(-rows // _OUTPUTS), -(-columns // 2), _OUTPUTS, 2)
    call = (weight.data_ptr(), rows, columns, weight.stride()[0], values.data_ptr(), torch.get_num_threads())
    _function("strata_dense_pack")(_PACK_CALL.pack(*call))
    return PackedWeight(values, rows, columns)


def rows(weight: PackedWeight, numbers: Tensor) -> Tensor:
    """numbers: int64 [M] of outputs -> their rows of the weight, [M, K]."""
    found = weight.values[numbers // _OUTPUTS, :, numbers % _OUTPUTS]
    return found.flatten(1)[:, : weight.in_features]


class PackedProduct:
    """inputs [..., K] -> [..., N]: by a packed weight, plus `bias` [N] if any, all bfloat16. What names the weight in a call is worked out once."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        bias = None if bias is None else bias.contiguous()
        self._held = (weight, bias)
        self._rows, self._columns = weight.out_features, weight.in_features
        at_bias = 0 if bias is None else bias.data_ptr()
        self._weight = _WEIGHT.pack(weight.values.data_ptr(), self._rows, self._columns, at_bias)
        self._call = _function("strata_dense_linear")

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dtype is not torch.bfloat16 or inputs.shape[-1] != self._columns:
            raise ValueError(f"inputs {inputs.dtype} {list(inputs.shape)} must be bfloat16 [..., {self._columns}]")
        tokens = _lined_up(inputs.reshape(-1, self._columns))
        count, rows = tokens.shape[0], self._rows
        out = tokens.new_empty(count, rows)
        numbers = _TOKENS.pack(tokens.data_ptr(), count, tokens.stride(0)) + self._weight
        self._call(numbers + _RESULT.pack(out.data_ptr(), rows, torch.get_num_threads()))
        return out.view(*inputs.shape[:-1], rows)


def _aligned(*shape: int) -> Tensor:
    """Of bfloat16: torch's own memory begins where a line of the cache does."""
    values = torch.empty(shape, dtype=torch.bfloat16)
    assert values.data_ptr() % 64 == 0
    return values


def _lined_up(matrix: Tensor) -> Tensor:
    return matrix if matrix.is_contiguous() or matrix.stride(1) == 1 else matrix.contiguous()


@cache
def _function(name: str) -> Callable[[bytes], None]:
    found = library()
    assert found is not None, "`takes` was not asked"
    function = getattr(found, name)
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    called: Callable[[bytes], None] = function
    return called
