"""Hidden states to bytes and back, without a copy on a CPU. Used by workers at both ends of a link."""

import torch

from strata_planner.contract.formats import ComputeType
from strata_runtime.formats import COMPUTE_DTYPES


def to_bytes(hidden: torch.Tensor) -> memoryview:
    """hidden: [tokens, hidden], any device; the raw bytes in row order."""
    return hidden.detach().cpu().contiguous().view(torch.uint8).flatten().numpy().data


def from_bytes(data: memoryview | bytearray, dtype: ComputeType, hidden: int) -> torch.Tensor:
    """A tensor [tokens, hidden] over `data`, which must stay alive and is not to be written."""
    if not len(data):
        return torch.empty(0, hidden, dtype=COMPUTE_DTYPES[dtype])
    return torch.frombuffer(data, dtype=COMPUTE_DTYPES[dtype]).view(-1, hidden)
