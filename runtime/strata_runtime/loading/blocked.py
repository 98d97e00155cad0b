"""Dense 16-bit linears in oneDNN's blocked layout, for CPUs that multiply bfloat16.

Used by `load_stage` for the linears that the plan leaves dense. Same products and sums as nn.Linear and the same bytes, but
the weight needs no rearranging in every call: 1.4 to 2 times as fast for 2 to 16 tokens, as fast for one and for many.
"""

import torch
from torch import nn

from strata_runtime.formats import MAKERS

_TOKENS = 16  # the layout is chosen for about a decode step's number of tokens


def can_block(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device has the kernel for `dtype`."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001, torch has no public name for it


def dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """A dense linear as this device multiplies it fastest. The weight's own memory stays where it need not be rearranged."""
    if can_block(weight.dtype, weight.device):
        return BlockedLinear(weight, bias)
    return MAKERS["dense"](weight, bias, "dense", weight.dtype)


class BlockedLinear(nn.Module):
    """[..., K] -> [..., N]. The weight is opaque: it can only be multiplied by."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # No parameter or buffer: the opaque layout supports none of a module's moves and copies.
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)  # noqa: SLF001, see can_block
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001, see can_block
            inputs, self.blocked, self.bias, "none", [], ""
        )
        return out
