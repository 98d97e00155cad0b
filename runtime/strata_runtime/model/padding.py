"""Rows padded to few numbers: on a processor the libraries keep kernels for every number that they meet."""

import torch
from torch.nn import functional

from strata_planner.contract.rows import padded_rows


def padded(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [n, ...] with zeros after them, so that few row numbers occur."""
    more = padded_rows(rows.shape[0]) - rows.shape[0]
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, more)) if more else rows
