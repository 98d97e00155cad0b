"""What stands between the token table and the first layer: learned positions, projections, multipliers. It belongs to the stage that embeds.

Used by the adapter. Between stages the hidden states always have `hidden_size` columns, and positions in them.
"""

from typing import Any

import torch
from torch import nn

EMBEDDING_SIDE = ("embed_positions", "wpe", "project_in", "word_embeddings_layernorm")  # of OPT, GPT-2, BLOOM
_POSITIONS = ("embed_positions", "wpe")


class NoPositions(nn.Module):
    """Stands where positions were added on the first stage already."""

    def forward(self, *given: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return (given[0] if position_ids is None else position_ids).new_zeros(1)


def without_embedding_side(decoder: Any) -> None:
    """Take everything but the layers, the last norm and the token table out of the module that holds the layers."""
    for name in EMBEDDING_SIDE:
        if getattr(decoder, name, None) is not None:
            stand_in = NoPositions() if name in _POSITIONS else nn.Identity()
            setattr(decoder, name, stand_in)
    if hasattr(decoder, "embedding_multiplier"):
        decoder.embedding_multiplier = 1.0  # Granite multiplies whatever enters its first layer
