"""Linears of a checkpoint in float8 with a scale for each block (`fp8_block`). Made by the loader.

`weight = code * scale` in float32, rounded once to the compute type; activations stay in it.
"""

from torch import Tensor

from strata_runtime.formats.float8.blocks import BlockFloat8Weight
from strata_runtime.formats.kernels import BLOCK_FLOAT8_KERNELS, select
from strata_runtime.formats.quant_linear import QuantLinear


class BlockFloat8Linear(QuantLinear):
    """Takes the stored weight as it is; bias: [N] in the compute type, or None."""

    def __init__(self, weight: BlockFloat8Weight, bias: Tensor | None) -> None:
        super().__init__((weight.codes.shape[0], weight.codes.shape[1]), "fp8_block", bias)
        self.block = weight.block
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)

    @property
    def stored(self) -> BlockFloat8Weight:
        return BlockFloat8Weight(self.codes, self.scales, self.block)

    def multiply(self, tokens: Tensor) -> Tensor:
        stored = self.stored
        return select(BLOCK_FLOAT8_KERNELS, self.format, tokens, stored).run(tokens, stored)

    def dequantized(self) -> Tensor:
        return self.stored.dequantized()
