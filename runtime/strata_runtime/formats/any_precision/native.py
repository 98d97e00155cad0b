"""The native quantizer (`kernels/native/kmeans.cpp`) and sums of Hessians (`kernels/native/curvature.cpp`) behind the signatures of those in torch.

Called by `quantize` and `refit` where `library_here` gives a library.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from strata_runtime.kernels import native

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def library_here() -> ctypes.CDLL | None:
    found = native.library()
    if found is not None:
        found.strata_quantize_any.restype = None
        found.strata_quantize_any.argtypes = [
            *(_POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
            *(_INT, _INT, _POINTER, _POINTER, _INT),
        ]
        found.strata_curvature.restype = None
        found.strata_curvature.argtypes = [
            *(_POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
            *(_SIZE, _POINTER, _POINTER, _INT),
        ]
    return found


def cluster_rows(
    weight: Tensor, importance: Tensor | None, seed_bits: int, bits: int, codes: Tensor
) -> dict[int, Tensor]:
    """Fills codes, uint8 [R, K] contiguous; gives tables float32 [R, 2^width]. weight and importance: float32 [R, K] on the CPU."""
    library = library_here()
    assert library is not None
    weight = weight.contiguous()
    importance = importance if importance is None or importance.stride() == (0, 1) else importance.contiguous()
    sizes = [1 << width for width in range(seed_bits, bits + 1)]
    tables = torch.empty(len(weight), sum(sizes))
    library.strata_quantize_any(
        weight.data_ptr(),
        None if importance is None else importance.data_ptr(),
        0 if importance is None else importance.stride(0),
        *weight.shape,
        *(seed_bits, bits),
        *(codes.data_ptr(), tables.data_ptr(), torch.get_num_threads()),
    )
    return dict(zip(range(seed_bits, bits + 1), tables.split_with_sizes(sizes, dim=1), strict=True))


def curved(codes: Tensor, missed: Tensor, hessian: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `refit.curved`, on the CPU. hessian: float32 [K, K], contiguous and symmetric; 1 <= count <= 256."""
    library = library_here()
    assert library is not None
    codes, missed = codes.contiguous(), missed.contiguous()
    curvature, slope = torch.empty(len(codes), count, count), torch.empty(len(codes), count)
    library.strata_curvature(
        hessian.data_ptr(),
        codes.data_ptr(),
        missed.data_ptr(),
        *codes.shape,
        count,
        *(curvature.data_ptr(), slope.data_ptr(), torch.get_num_threads()),
    )
    return curvature, slope
