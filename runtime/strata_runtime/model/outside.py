"""What stands in a model where another stage computes."""

from typing import Any

import torch
from torch import nn


class Outside(nn.Module):
    """Hands its first argument on."""

    def forward(self, first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return first


class OutsideInTuple(Outside):
    """The same among layers that answer with more than hidden states."""

    def forward(self, first: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (first,)
