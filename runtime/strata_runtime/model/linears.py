"""Linears that transformers has classes of its own for, as plain ones, and experts as [out, in]: read, stored and quantized as any other.

Used by ModelSlice while the model is on the meta device. The products are the same: GPT-2's Conv1D and gpt-oss' experts only hold their
weights as [in, out].
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_EXPERTS_FIRST = 3  # dimensions of a parameter that holds all experts of a layer
_TRANSPOSED = frozenset({"Llama4TextExperts"})  # experts that do not say so themselves
_KEPT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("DeepseekV3Attention", "Glm4MoeLiteAttention"), ("kv_b_proj",)),
    "Qwen3NextGatedDeltaNet": ("in_proj_ba",),
    **dict.fromkeys(("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), ("in_proj_b", "in_proj_a")),
}
_LIKE_LINEAR = frozenset({"FalconLinear"})  # the bias is added after the product is rounded


def use_plain_linears(model: nn.Module) -> frozenset[str]:
    """Replaces them in place. Returns the paths of those that checkpoints hold as [in, out]: linears, and parameters of experts."""
    transposed: set[str] = set()
    for path, module in list(model.named_modules()):
        for name in _KEPT.get(type(module).__name__, ()):
            setattr(module, name, KeptWeight(getattr(module, name).weight))
        if getattr(module, "is_transposed", type(module).__name__ in _TRANSPOSED):
            transposed |= {f"{path}.{name}" for name in _turn_experts(module)}
        for name, child in list(module.named_children()):
            if type(child).__name__ in _LIKE_LINEAR:
                setattr(module, name, _plain(child.in_features, child.out_features, child.bias))
            elif isinstance(child, Conv1D):
                setattr(module, name, _plain(child.nx, child.nf, child.bias))
                transposed.add(f"{path}.{name}")
    return frozenset(transposed)


class KeptWeight(nn.Module):
    """A weight without a format below 16 bits: it is multiplied in parts, or what it makes decides how fast a state decays."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _turn_experts(module: Any) -> list[str]:
    """Names of the parameters [experts, in, out] of a layer's experts, which are [experts, out, in] from now on."""
    module.is_transposed = False
    turned = [name for name, each in module.named_parameters(recurse=False) if each.ndim == _EXPERTS_FIRST]
    for name in turned:
        setattr(module, name, nn.Parameter(getattr(module, name).mT))
    return turned


def _plain(in_features: int, out_features: int, bias: torch.Tensor | None) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
