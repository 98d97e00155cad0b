"""What a layer does with each row beside its products, in the native library: bfloat16 on processors that multiply it.

Called by `model.fused_forwards`. Each call takes the place of some ten of torch's, whose overhead is a third of a small model's step.
"""

import struct

import torch
from torch import Tensor

from strata_runtime.kernels import native_dense
from strata_runtime.kernels.native_calls import function

_NORM = struct.Struct("6qdq")  # `NormCall` of kernels/native/calls.h, then the others
_ROTATE = struct.Struct("10q")
_GATE = struct.Struct("8q")


def takes(rows: Tensor) -> bool:
    """Whether rows are of a kind that the library works on, the items of a row next to each other."""
    return rows.dtype is torch.bfloat16 and rows.is_cpu and rows.stride(-1) == 1 and native_dense.runs()


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """rows: [..., width], weight: [width] -> weight * rows / sqrt(mean(rows^2) + epsilon), contiguous."""
    width = rows.shape[-1]
    flat = rows.reshape(-1, width)
    out = rows.new_empty(rows.shape)
    function("strata_rms_norm")(
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
    function("strata_rotate")(
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


def gate(inputs: Tensor, factors: Tensor) -> Tensor:
    """silu(inputs) * factors, [..., width] each, contiguous."""
    width = inputs.shape[-1]
    flat, others = inputs.reshape(-1, width), factors.reshape(-1, width)
    out = inputs.new_empty(inputs.shape)
    function("strata_gate")(
        _GATE.pack(
            flat.data_ptr(),
            flat.stride(0),
            others.data_ptr(),
            others.stride(0),
            flat.shape[0],
            width,
            out.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return out
