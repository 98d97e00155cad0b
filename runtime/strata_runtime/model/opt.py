"""What OPT does otherwise: learned positions with an offset of two, and projections around the layers.

Used by the adapter. Positions and `project_in` belong to the embedding, `final_layer_norm` and `project_out` to the head;
between stages the hidden states always have `hidden_size` columns.
"""

from typing import Any

import torch
from torch import nn

EMBEDDING_SIDE = ("embed_positions", "project_in")


class NoPositions(nn.Module):
    """Stands where positions were added on the first stage already."""

    def forward(self, *_: Any, position_ids: torch.Tensor) -> torch.Tensor:
        return position_ids.new_zeros(1)


def without_embedding(decoder: Any) -> None:
    """Take the positions and the input projection out of an OPTDecoder."""
    decoder.embed_positions = NoPositions()
    decoder.project_in = None
