"""What a layer does with each row beside its products, in the native library: bfloat16 on processors that multiply it.

Called by `model.fused_forwards`. Each call takes the place of some ten of torch's, whose overhead is a third of a small model's step.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from strata_runtime.kernels import native_dense
from strata_runtime.kernels.native import library

_NORM = struct.Struct("6qdq")  # `NormCall` of kernels/native/rowwise.cpp
_ROTATE = struct.Struct("10q")
_GATE = struct.Struct("7q")


def takes(*tensors: Tensor) -> bool:
    """Whether all are of a kind that the library works on, the items of a row next to each other."""
    return all(native_dense.multiplies(each.dtype, each.device) and each.stride(-1) == 1 for each in tensors)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """rows: [..., width], weight: [width] -> weight * rows / sqrt(mean(rows^2) + epsilon), contiguous."""
    width = rows.shape[-1]
    flat = rows.reshape(-1, width)
    out = rows.new_empty(rows.shape)
    _function("strata_rms_norm")(
        _NORM.pack(
            flat.data_ptr(),
            flat.shape[0],
            width,
            flat.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            epsilon,
            torch.get_num_threads(),
        )
    )
    return out


def rotate(items: Tensor, cos: Tensor, sin: Tensor) -> None:
    """items: [heads, tokens, width], turned in place by cos and sin [tokens, width]: one half of the width against the other."""
    heads, tokens, width = items.shape
    _function("strata_rotate")(
        _ROTATE.pack(
            items.data_ptr(),
            heads,
            tokens,
            width,
            items.stride(0),
            items.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            torch.get_num_threads(),
        )
    )


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., width] and of one layout."""
    width = gate.shape[-1]
    gate, up = gate.reshape(-1, width), up.reshape(-1, width)
    out = up.new_empty(up.shape)
    _function("strata_gate")(
        _GATE.pack(
            gate.data_ptr(),
            up.data_ptr(),
            out.data_ptr(),
            up.shape[0],
            width,
            up.stride(0),
            torch.get_num_threads(),
        )
    )
    return out


@cache
def _function(name: str) -> Callable[[bytes], None]:
    found = library()
    assert found is not None, "`takes` was not asked"
    function = getattr(found, name)
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    called: Callable[[bytes], None] = function
    return called
