"""Per-layer tables: measured milliseconds of one decoder layer of one shape on some device types, as a source of latencies.

Read from YAML by `strata plan --costs FILE` (`LayerTable.from_yaml`) or converted from published files (`benchmarks.reference.published_tables`).
The smallest file:

    devices: [T4]                       # catalogue names, or types that the cluster's profiles name
    source: where the numbers are from
    layer: {hiddenSize: 7168, heads: 56, kvHeads: 56, headDim: 128, linearParameters: 616562688}
    prefillMilliseconds: {16: [[1024, 67.01], [2048, 124.69]]}   # bits: [tokens of the micro-batch, milliseconds]
    decodeMilliseconds: {16: [[2, 5.85], [4, 6.48]]}             # bits: [sequences, milliseconds]
    promptTokens: 512                   # per sequence while prefilling; left out: no one length
    pastTokens: 512                     # keys before each decoded token; left out: no one length

Rules. A table answers only for layers of exactly its shape, in a 16-bit compute type, with 16-bit KV, at bits that it has.
Between points it is linear, below the first the first holds, beyond the last time grows in proportion. Prompts of another
length than `promptTokens` are taken in proportion to their tokens, which leaves out that attention grows with the square; a past
other than `pastTokens` costs the same: the source's name says "scaled" in either case. Devices that work as one (tensor
parallelism inside the measurement) are a device type of their own: their collectives are in the numbers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import msgspec
import yaml

from strata_planner.contract.formats import DEFAULT_FORMAT_OF_BITS, FormatName
from strata_planner.contract.values import ContractError, Value, from_builtins
from strata_planner.costs.interpolation import Axis
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.errors import InputError
from strata_planner.question.model import LayerShape, Model
from strata_planner.question.reading import only_yaml_errors

Points = tuple[tuple[float, float], ...]  # where, milliseconds


class TableShape(Value, frozen=True):
    """What tells layers apart for a table. `linear_parameters`: weights of all linear operators, biases left out."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    linear_parameters: int

    @classmethod
    def of(cls, layer: LayerShape) -> Self:
        hidden = next((each.out_features for each in layer.linears if each.name == "o_proj"), 0)
        return cls(hidden, layer.heads, layer.kv_heads, layer.head_dim, layer.linear_parameters)


class LayerTable(Value, frozen=True):
    """One layer's milliseconds, per bits: prefill by tokens of the micro-batch, decode by its sequences."""

    devices: tuple[str, ...]
    source: str
    layer: TableShape
    prefill_milliseconds: dict[int, Points] = msgspec.field(default_factory=dict)
    decode_milliseconds: dict[int, Points] = msgspec.field(default_factory=dict)
    prompt_tokens: int = 0
    past_tokens: int = 0

    @classmethod
    def from_yaml(cls, text: str, name: str) -> Self:
        """`name`: what errors call it. Raises InputError."""
        try:
            with only_yaml_errors():
                data = yaml.safe_load(text)
            table = from_builtins(data, cls)
        except yaml.YAMLError as error:
            raise InputError(f"layer table {name}: not valid YAML: {error}") from error
        except ContractError as error:
            raise InputError(f"layer table {name}: {error}") from error
        table.check(name)
        return table

    def check(self, name: str) -> None:
        """Raises InputError with the row and the rule that it breaks."""
        if not self.devices:
            raise InputError(f"layer table {name}: devices is empty; name the device types that it was measured on")
        fields = (("prefillMilliseconds", self.prefill_milliseconds), ("decodeMilliseconds", self.decode_milliseconds))
        if not any(points for _, points in fields):
            raise InputError(f"layer table {name}: give prefillMilliseconds or decodeMilliseconds")
        for field, by_bits in fields:
            for bits, points in by_bits.items():
                _check_points(f"layer table {name}: {field} at {bits} bits", bits, points)


def _check_points(where: str, bits: int, points: Points) -> None:
    if bits not in DEFAULT_FORMAT_OF_BITS:
        raise InputError(f"{where}: bits are one of {', '.join(map(str, DEFAULT_FORMAT_OF_BITS))}")
    if not points:
        raise InputError(f"{where}: at least one point is needed, or leave these bits out")
    for number, (at, milliseconds) in enumerate(points, 1):
        if at < 1 or milliseconds <= 0:
            raise InputError(
                f"{where}, row {number}: [{at:g}, {milliseconds:g}]; tokens or sequences are at least 1 and milliseconds "
                "above 0"
            )
        if number > 1 and at <= points[number - 2][0]:
            raise InputError(f"{where}, row {number}: {at:g} follows {points[number - 2][0]:g}; rows must rise")


@dataclass(frozen=True)
class LayerTables:
    """A LatencySource: the first table of the device and shape answers. Knows layers only, neither heads nor steps."""

    tables: tuple[LayerTable, ...]

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed | None:
        if rates.compute_type == "float32" or rates.kv_bits != 16:
            return None
        shape = TableShape.of(layer)
        for number, table in enumerate(self.tables):
            axis = self._axes.get((number, format_name, phase.decoding))
            if axis is not None and rates.name in table.devices and table.layer == shape:
                at = phase.sequences if phase.decoding else phase.total_tokens
                return Timed(axis.at(at) * 1e-3, _named(table, phase))
        return None

    def head(self, model: Model, rates: Rates, sequences: int) -> None:  # noqa: ARG002  a layer's table has no head
        return None

    def step(self, model: Model, rates: Rates, phase: Phase) -> None:  # noqa: ARG002  nor a step
        return None

    @cached_property
    def _axes(self) -> dict[tuple[int, FormatName, bool], Axis]:
        """By table, format and whether decoding."""
        return {
            (number, DEFAULT_FORMAT_OF_BITS[bits], decoding): Axis.of(points)
            for number, table in enumerate(self.tables)
            for decoding, by_bits in ((False, table.prefill_milliseconds), (True, table.decode_milliseconds))
            for bits, points in by_bits.items()
        }


def _named(table: LayerTable, phase: Phase) -> str:
    measured, asked = (
        (table.past_tokens, phase.context) if phase.decoding else (table.prompt_tokens, float(phase.tokens))
    )
    what = "keys" if phase.decoding else "tokens a prompt"
    scaled = f", scaled from {measured} {what}" if measured and measured != asked else ""
    return f"layer table, {table.source}{scaled}"
