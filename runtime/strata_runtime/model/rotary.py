"""Rotary position embeddings (RoFormer, arXiv 2104.09864) for attention that transformers does not write by its interface. Used by `own_attention` and `latent`."""

import torch


def turned_halves(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Both halves of each head are one plane."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def turned_pairs(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbouring values are a pair; what comes has the first of all pairs before the second ones."""
    cos, sin = (each.chunk(2, dim=-1)[0] for each in (cos, sin))
    first, second = heads[..., 0::2], heads[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
