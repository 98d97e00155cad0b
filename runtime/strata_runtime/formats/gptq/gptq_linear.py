"""A linear whose weight GPTQ has quantized (`gptq2` ... `gptq8`), from a checkpoint or from our own quantizer."""

import torch
from torch import Tensor

from strata_planner.contract.formats import GPTQ
from strata_runtime.formats.errors import PrecisionError
from strata_runtime.formats.gptq import kernels
from strata_runtime.formats.gptq.humming_kernels import RepackedWeight
from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.kernels import select
from strata_runtime.formats.quant_linear import QuantLinear


class GptqLinear(QuantLinear):
    """Takes the stored weight as it is; bias: [N] in the compute type, or None.

    `settle` says whether the weight stays in planes or is repacked for the kernels that were measured to be faster on its device.
    """

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
        self._settled = False
        self._repacked: RepackedWeight | None = None

    @property
    def stored(self) -> GptqWeight:
        """Raises PrecisionError once the weight is repacked: its planes are gone."""
        if self._repacked is not None:
            raise PrecisionError(
                f"{self.format}: its planes gave way to {kernels.HUMMING}; ask `dequantized` for its values"
            )
        planes = tuple(self.get_buffer(name) for name in self.plane_names)
        return GptqWeight(planes, self.scales, self.zeros, self.group, self.in_features, self.order)

    def multiply(self, tokens: Tensor) -> Tensor:
        self.settle(tokens.dtype)
        return kernels.multiply(tokens, self._repacked or self.stored)

    def dequantized(self) -> Tensor:
        return (self._repacked or self.stored).dequantized()

    def kernel_name(self, tokens: Tensor) -> str:
        """Which kernel multiplies tokens [M, K]."""
        if self._repacked is not None:
            return kernels.HUMMING
        stored = self.stored
        return select(kernels.GPTQ_KERNELS, self.format, stored.gathered(tokens), stored).name

    def settle(self, dtype: torch.dtype) -> None:
        """Once, on the device and for the compute type in which it will multiply: planes, or the layout of kernels that are faster here.

        Left undone, the first product does it; compilers may take a minute then.
        """
        if self._settled:
            return
        self._settled = True
        repacked = kernels.repacked_if_fastest(self.stored, dtype)
        if repacked is None:
            return
        self._repacked = repacked
        for name in (*self.plane_names, "scales", "zeros"):
            delattr(self, name)
        for name, part in repacked.parts.items():  # what the module holds is counted
            self.register_buffer(f"repacked_{name}", part)
