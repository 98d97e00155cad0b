"""One linear operator of a layer: its shape, how many of it there are, and the bytes of its weight in each format.

Made by `model` and `mixers`, read by the costs. Knows no layer.
"""

from strata_planner.contract.formats import (
    GPTQ,
    GPTQ_GROUP,
    STORED_FORMATS,
    ComputeType,
    FormatName,
    block_float8_bytes,
    stored_bytes,
)
from strata_planner.contract.quantization import ModuleQuantization
from strata_planner.contract.values import Value


class Linear(Value, frozen=True):
    """`copies` equal weights [out_features, in_features], `active` of which a token passes (experts).

    `quantizable`: it has formats below 16 bits (what routes has none). `stored`: how the checkpoint holds it, where it is quantized already.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    copies: int = 1
    active: int = 1
    quantizable: bool = True
    stored: ModuleQuantization | None = None

    @property
    def parameters(self) -> int:
        return self.copies * (self.out_features * self.in_features + self.out_features * self.bias)

    def format_in(self, layer_format: FormatName) -> FormatName:
        """The format of this linear in a layer of `layer_format`: `gptq*` and `fp8_block` leave each linear as its checkpoint holds it."""
        if layer_format in STORED_FORMATS:
            return self.stored.format if self.stored else "dense"
        return layer_format if self.quantizable else "dense"

    def weight_bytes(self, layer_format: FormatName, compute_type: ComputeType) -> int:
        """Of one copy, in a layer of `layer_format`, with scales, zeros, tables and order; the bias is apart."""
        name = self.format_in(layer_format)
        if self.stored and self.stored.block and name == self.stored.format:
            return block_float8_bytes(self.out_features, self.in_features, self.stored.block)
        group, ordered = GPTQ_GROUP, False
        if self.stored and name in GPTQ.values():
            group = self.stored.group or self.in_features
            ordered = self.stored.ordered and group < self.in_features  # one group has no order
        return stored_bytes(name, self.out_features, self.in_features, compute_type, group=group, ordered=ordered)
