"""Linears that transformers has classes of its own for, as plain ones: read, stored and quantized as any other.

Used by ModelSlice while the model is on the meta device. The products are the same: GPT-2's Conv1D only holds its weight as [in, out].
"""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_LIKE_LINEAR = frozenset({"FalconLinear"})  # the bias is added after the product is rounded


def use_plain_linears(model: nn.Module) -> frozenset[str]:
    """Replaces them in place. Returns the paths of those whose weights checkpoints hold as [in, out]."""
    transposed = set()
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in _LIKE_LINEAR:
                setattr(module, name, _plain(child.in_features, child.out_features, child.bias))
            elif isinstance(child, Conv1D):
                setattr(module, name, _plain(child.nx, child.nf, child.bias))
                transposed.add(f"{path}.{name}")
    return frozenset(transposed)


def _plain(in_features: int, out_features: int, bias: torch.Tensor | None) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
