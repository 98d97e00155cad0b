"""What every quantized linear is: a module from [..., K] to [..., N] whose weight is stored once, in few bits.

Base of the linears of all formats; each knows its stored form and asks `kernels` how to multiply by it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from strata_planner.contract.formats import FormatName


class QuantLinear(nn.Module):
    """[..., K] -> [..., N] in the compute type; the weight is stored once, in integers, as `contract.formats` counts it."""

    def __init__(self, shape: tuple[int, int], format_name: FormatName, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.format: FormatName = format_name
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, self.in_features)
        out = self.multiply(tokens)
        if self.bias is not None:
            out += self.bias
        return out.view(*inputs.shape[:-1], self.out_features)

    def multiply(self, tokens: Tensor) -> Tensor:
        """tokens [M, K] -> [M, N], without the bias."""
        raise NotImplementedError

    def native_product(self, tokens: int) -> bytes | None:  # noqa: ARG002
        """How a call of the native library for a whole layer of so many bfloat16 tokens names it; None: not that library multiplies by it."""
        return None

    def dequantized(self) -> Tensor:
        """The stored weight as float32 [N, K]."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


class NamedProducts:
    """Names of a weight's products for whole layers (`native_product`), each worked out once for as long as the weight stays where it is."""

    def __init__(self) -> None:
        self._codes: Tensor | None = None
        self._names: dict[int, bytes | None] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "NamedProducts":
        """Of a weight elsewhere."""
        return NamedProducts()

    def of(self, codes: Tensor, tokens: int, named: Callable[[Tensor], bytes | None]) -> bytes | None:
        """codes: [N, K] of the weight as it is now. `named` is asked with as many tokens as are meant, of any values."""
        if self._codes is not codes:
            self._codes, self._names = codes, {}
        if tokens not in self._names:
            self._names[tokens] = named(codes.new_empty(tokens, codes.shape[1], dtype=torch.bfloat16))
        return self._names[tokens]
