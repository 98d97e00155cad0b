"""Rounding to nearest in the native library (`kernels/native/rounding.cpp`). Called by `quantizers`, whose forms in torch are the references."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from strata_planner.contract.formats import GROUP_SIZES
from strata_runtime.kernels import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_WEIGHT = (_POINTER, _INT, _SIZE, _SIZE, _SIZE)


def takes(weight: Tensor, scale_dtype: torch.dtype) -> bool:
    """Whether the library is here and knows these types."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _TYPES
        and scale_dtype in _TYPES
        and weight.stride(1) == 1
        and _library() is not None
    )


def takes_groups(weight: Tensor, group: int, scale_dtype: torch.dtype) -> bool:
    return group in GROUP_SIZES and takes(weight, scale_dtype)


def quantize_groups(
    weight: Tensor, bits: int, group: int, scale_dtype: torch.dtype, ratios: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K], scales and zeros [N, K / group] in `scale_dtype`. weight: [N, K], finite; ratios: the clipping that is tried."""
    library = _library()
    assert library is not None
    out_features, in_features = weight.shape
    codes = torch.empty(out_features, in_features, dtype=torch.uint8)
    scales = torch.empty(out_features, in_features // group)
    zeros = torch.empty_like(scales)
    tried = (ctypes.c_float * len(ratios))(*ratios)
    library.strata_quantize_groups(
        *_told(weight),
        *(group, bits, _TYPES[scale_dtype], tried, len(ratios)),
        *(codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), torch.get_num_threads()),
    )
    return codes, scales.to(scale_dtype), zeros.to(scale_dtype)


def quantize_channels(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K], a scale per output [N] in `scale_dtype`. weight: [N, K], finite."""
    library = _library()
    assert library is not None
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    library.strata_quantize_channels(
        *_told(weight), _TYPES[scale_dtype], codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()
    )
    return codes, scales.to(scale_dtype)


def _told(weight: Tensor) -> tuple[int, ...]:
    """Address, type, rows, columns, bytes from row to row."""
    return (weight.data_ptr(), _TYPES[weight.dtype], *weight.shape, weight.stride(0) * weight.itemsize)


@cache
def _library() -> ctypes.CDLL | None:
    found = native.library()
    if found is not None:
        found.strata_quantize_groups.restype = found.strata_quantize_channels.restype = None
        found.strata_quantize_groups.argtypes = [
            *_WEIGHT,
            *(_SIZE, _INT, _INT, ctypes.POINTER(ctypes.c_float), _INT),
            *(_POINTER, _POINTER, _POINTER, _INT),
        ]
        found.strata_quantize_channels.argtypes = [*_WEIGHT, _INT, _POINTER, _POINTER, _INT]
    return found
