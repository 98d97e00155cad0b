"""Keys and values at 8 bits: a symmetric scale per token and head. Used by the pool alone."""

import torch
from torch import Tensor

SCALE_TYPE = torch.bfloat16  # as far as float32 reaches; `contract.kv` counts it
LARGEST = 127


def round_entries(entries: Tensor) -> tuple[Tensor, Tensor]:
    """entries [..., head_dim] -> codes int8 [..., head_dim], scales [...] in SCALE_TYPE.

    Codes are nearest for the scale as it is stored, so that an entry is off by at most half of it.
    """
    low, high = entries.aminmax(dim=-1)
    peaks = torch.maximum(high, -low).float()
    scales = (peaks / LARGEST).clamp_min_(torch.finfo(SCALE_TYPE).tiny).to(SCALE_TYPE)
    steps = entries.to(torch.float32, copy=True).div_(scales[..., None].float())
    return steps.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def restore(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once to `dtype`: codes and scales are exact in bfloat16 and in float32, scales are not in float16."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max  # a scale that was rounded up would take the largest entries beyond it
        return codes.float().mul_(scales.float()[..., None]).clamp_(-limit, limit).to(dtype)
    return codes.to(dtype).mul_(scales.to(dtype)[..., None])
