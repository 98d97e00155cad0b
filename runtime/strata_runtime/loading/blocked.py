"""Dense 16-bit linears in a layout that the processor multiplies fastest, for CPUs that multiply bfloat16; and the table that head and embedding share.

Used by `load_stage` for the linears that the plan leaves dense, and for the head. Same products and sums as nn.Linear and the same bytes. The
native library's layout where it runs: the weight is one stream for any number of tokens, and no kernels are kept for their number. Else oneDNN's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from strata_runtime.formats import MAKERS
from strata_runtime.kernels import native_dense
from strata_runtime.kernels.native_dense import PackedProduct, PackedWeight

_PLAIN_TABLES: tuple[type[nn.Module], ...] = (nn.Embedding,)
_TOKENS = 16  # oneDNN's layout is chosen for about a decode step's number of tokens


def can_block(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device has a kernel for `dtype` with a layout of its own."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return False
    return native_dense.takes(dtype, device) or native_dense.onednn_multiplies()


def dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """A dense linear as this device multiplies it fastest. The weight's own memory stays where it need not be rearranged."""
    if can_block(weight.dtype, weight.device):
        return BlockedLinear(weight, bias)
    return MAKERS["dense"](weight, bias, "dense", weight.dtype)


class BlockedLinear(nn.Module):
    """[..., K] -> [..., N]. The weight is opaque: it can only be multiplied by."""

    def __init__(self, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        # No parameter or buffer: the opaque layouts support none of a module's moves and copies.
        self._multiply: Product
        self.packed: PackedWeight | None = None  # where the native library multiplies
        if isinstance(weight, PackedWeight) or native_dense.takes(weight.dtype, weight.device):
            self.packed = packed = weight if isinstance(weight, PackedWeight) else native_dense.pack(weight)
            self.out_features, self.in_features = packed.out_features, packed.in_features
            self._multiply = PackedProduct(packed, bias)
        else:
            self.out_features, self.in_features = weight.shape
            blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)  # noqa: SLF001, see can_block
            self._multiply = partial(_onednn, blocked, bias)
        self.bias = bias

    @property
    def nbytes(self) -> int:
        """Of the weight."""
        return self.out_features * self.in_features * torch.bfloat16.itemsize

    @property
    def opaque(self) -> Sequence[torch.Tensor]:
        """The memory of a weight in the native library's layout (`huge_pages`)."""
        return () if self.packed is None else (self.packed.values,)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._multiply(inputs)

    def native_product(self, tokens: int) -> bytes | None:  # noqa: ARG002
        """As of `QuantLinear`."""
        return self._multiply.numbers if isinstance(self._multiply, PackedProduct) else None


class BlockedTable(nn.Module):
    """Token ids [...] -> rows [..., K] of a weight that the head multiplies by; `scale`: what they are multiplied by, if anything."""

    def __init__(self, weight: PackedWeight, scale: torch.Tensor | None) -> None:
        super().__init__()
        self._weight, self._scale = weight, scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = native_dense.rows(self._weight, ids.reshape(-1)).view(*ids.shape, self._weight.in_features)
        return rows if self._scale is None else rows * self._scale


def blocked_pair(head: nn.Linear, table: nn.Embedding) -> tuple[BlockedLinear, BlockedTable] | None:
    """A head and an embedding of one weight, held once; None where this device or this kind of table is better served by them as they are."""
    scale: object = getattr(table, "embed_scale", None)
    if type(table) not in _PLAIN_TABLES and not isinstance(scale, torch.Tensor):
        return None
    if not native_dense.takes(head.weight.dtype, head.weight.device):
        return None
    packed = native_dense.pack(head.weight.data)
    own_scale = scale.to(head.weight.dtype) if isinstance(scale, torch.Tensor) else None
    return BlockedLinear(packed, head.bias), BlockedTable(packed, own_scale)


Product = Callable[[torch.Tensor], torch.Tensor]  # [..., K] -> [..., N]


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")  # noqa: SLF001
    return out
