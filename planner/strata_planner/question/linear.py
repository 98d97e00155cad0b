"""One linear operator of a layer: its shape, how many of it there are, and the bytes of its weight in each format.

Made by `model` and `mixers`, read by the costs. Knows no layer.
"""

from math import gcd

from strata_planner.contract.formats import (
    COMPUTE_TYPE_BYTES,
    GPTQ,
    GPTQ_GROUP,
    GROUP_SIZES,
    STORED_FORMATS,
    WHOLE_ROW_VALUES,
    ComputeType,
    FormatName,
    block_float8_bytes,
    groups_bytes,
    part_in_groups,
    stored_bytes,
)
from strata_planner.contract.quantization import ModuleQuantization
from strata_planner.contract.values import Value


class Linear(Value, frozen=True):
    """`copies` equal weights [out_features, in_features], `active` of which a token passes (experts).

    `quantizable`: it has formats below 16 bits (what routes has none). `stored`: how the checkpoint holds it, where it is quantized already.
    Of one device of several: `inputs`, its inputs' first, behind its last, and how many the whole has, where it has some of them; `part_of`, the expert
    of which it holds `held` whole ones, which count as a part of each.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    copies: int = 1
    active: int = 1
    quantizable: bool = True
    stored: ModuleQuantization | None = None
    inputs: tuple[int, int, int] | None = None
    part_of: "Linear | None" = None
    held: int = 0

    @property
    def parameters(self) -> int:
        return self.copies * (self.out_features * self.in_features + self.out_features * self.bias)

    def all_bytes(self, layer_format: FormatName, compute_type: ComputeType) -> int:
        """Of all copies that there are on the device, with their biases in the compute type."""
        one, count = (self, self.copies) if self.part_of is None else (self.part_of, self.held)
        bias = one.out_features * one.bias * COMPUTE_TYPE_BYTES[compute_type]
        return count * (one.weight_bytes(layer_format, compute_type) + bias)

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
        first, last, whole = self.inputs or (0, self.in_features, self.in_features)
        if name in {"int4", "int3"}:
            columns, narrow = part_in_groups(whole, first, last)
            return groups_bytes(name, self.out_features, columns, narrow or GROUP_SIZES[-1], compute_type)
        group, ordered = GPTQ_GROUP, False
        if self.stored and name in GPTQ.values():
            group = gcd(min(self.stored.group or whole, whole), first)
            ordered = self.stored.ordered and group < self.in_features  # one group has no order
        columns = self.in_features + WHOLE_ROW_VALUES * (name == "w8a8" and self.inputs is not None)
        return stored_bytes(name, self.out_features, columns, compute_type, group=group, ordered=ordered)
