"""The native quantizer of groups (`native/groups.cpp`). Called by `quantizers.quantize_groups`, whose form in torch is the reference."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from strata_planner.contract.formats import GROUP_SIZES
from strata_runtime import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def takes(weight: Tensor, group: int, scale_dtype: torch.dtype) -> bool:
    """Whether the library is here and knows these types and sizes."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _TYPES
        and scale_dtype in _TYPES
        and group in GROUP_SIZES
        and weight.stride(1) == 1
        and _library() is not None
    )


def quantize(
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
        *(weight.data_ptr(), _TYPES[weight.dtype], out_features, in_features, weight.stride(0) * weight.itemsize),
        *(group, bits, _TYPES[scale_dtype], tried, len(ratios)),
        *(codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), torch.get_num_threads()),
    )
    return codes, scales.to(scale_dtype), zeros.to(scale_dtype)


@cache
def _library() -> ctypes.CDLL | None:
    found = native.library()
    if found is not None:
        found.strata_quantize_groups.restype = None
        found.strata_quantize_groups.argtypes = [
            *(_POINTER, _INT, _SIZE, _SIZE, _SIZE, _SIZE, _INT, _INT, ctypes.POINTER(ctypes.c_float), _INT),
            *(_POINTER, _POINTER, _POINTER, _INT),
        ]
    return found
