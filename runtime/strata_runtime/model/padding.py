"""Rows padded to few numbers, where the libraries of a processor keep kernels for every number that they meet."""

import torch
from torch.nn import functional

from strata_planner.contract.rows import padded_rows
from strata_runtime.kernels.native_dense import onednn_multiplies


def pads(dtype: torch.dtype) -> bool:
    """Whether a library keeps kernels for every number of rows that it multiplies in this type: oneDNN in 16 bits. Where it does not multiply bfloat16
    the native library does, or torch, which keep none.
    """
    return dtype is not torch.bfloat16 or onednn_multiplies()


def padded(rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`rows` [n, ...] with zeros after them where that is of use, so that few row numbers occur. `dtype`: in which they will be multiplied, their own if None."""
    if not pads(rows.dtype if dtype is None else dtype):
        return rows
    more = padded_rows(rows.shape[0]) - rows.shape[0]
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, more)) if more else rows
