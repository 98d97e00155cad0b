"""A linear whose weight GPTQ has quantized (`gptq2` ... `gptq8`), from a checkpoint or from our own quantizer."""

from torch import Tensor

from strata_planner.contract.formats import GPTQ
from strata_runtime.precision.gptq import kernels
from strata_runtime.precision.gptq.weight import GptqWeight
from strata_runtime.precision.quant_linear import QuantLinear


class GptqLinear(QuantLinear):
    """Takes the stored weight as it is; bias: [N] in the compute type, or None."""

    def __init__(self, weight: GptqWeight, bias: Tensor | None) -> None:
        super().__init__((weight.out_features, weight.in_features), GPTQ[weight.bits], bias)
        self.group = weight.group
        self.plane_names = tuple(f"plane_{place}" for place in range(weight.bits))
        for name, plane in zip(self.plane_names, weight.planes, strict=True):
            self.register_buffer(name, plane)
        self.scales: Tensor
        self.zeros: Tensor
        self.order: Tensor | None
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("order", weight.order)

    @property
    def stored(self) -> GptqWeight:
        planes = tuple(self.get_buffer(name) for name in self.plane_names)
        return GptqWeight(planes, self.scales, self.zeros, self.group, self.in_features, self.order)

    def multiply(self, tokens: Tensor) -> Tensor:
        return kernels.multiply(tokens, self.stored)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()
