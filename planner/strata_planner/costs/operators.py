"""Seconds from measured operator tables: the data of the PyPI package `aiconfigurator-core` (extra `profiles`).

Chosen by the command line where the package is installed; asked by `latency` and `communication`. The tables hold kernels of
serving engines (TensorRT-LLM, vLLM, SGLang) on A100, H100, H200, L40S and B200: what good kernels reach on the device, not
what the runtime's own reach, which `strata profile` measures. A layer is

    its linears      GEMM tables, one look-up each, at m = all tokens of the micro-batch
    + attention      of its query heads, KV heads and width; tokens past the first ones of a prompt by difference
    + elementwise    two norms with residual, the activation and, where there are any, the norms of queries and keys:
                     bytes / (0.8 x bandwidth) + 3 us each, as the package counts

but never less than the device's profile says that launching a layer takes: the tables were measured inside CUDA graphs, which
the runtime has not. Asked for as a serving engine (`engine`) that bound falls away, linears of one input are one product, and
all-reduces are the engine's own kernel instead of NCCL: what published measurements of that engine are compared with.

A format that a device's tables lack is scaled from one that they have by the roofline's ratio, linear by linear, and the
source's name says so: formats of one device are compared on one ground. 8-bit KV is taken as the tables' 8-bit floats. Nothing is
said (None) about experts, float32, and devices that were not measured or whose rates the user gave. Only pyarrow is imported,
and that when the first table is read: the package itself (pandas, a compiled extension) never is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Self

import msgspec

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import ANY_PRECISION, COMPUTE_TYPE_BYTES, FormatName
from strata_planner.costs.interpolation import Axis
from strata_planner.costs.operator_data import (
    Table,
    all_reduces,
    attentions,
    engine_all_reduces,
    gemms,
    gpu,
    scale_searches,
)
from strata_planner.costs.roofline import linear_seconds
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.question.catalogue import catalogue
from strata_planner.question.linear import Linear
from strata_planner.question.model import LayerShape, Model

PACKAGE = "aiconfigurator-core"
# Catalogue name -> the package's system. An A800 computes as an A100, an A100-40GB exchanges as one.
SYSTEMS = {
    "A100-80GB": "a100_sxm",
    "A800-80GB": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "L40S": "l40s",
    "B200": "b200_sxm",
}
COLLECTIVES = {name: system for name, system in SYSTEMS.items() if name != "A800-80GB"} | {"A100-40GB": "a100_sxm"}
# Our format -> the tables' type of GEMM: 16 bits; int8 weights, 16-bit activations; int8 both (SmoothQuant); int4 weights.
GEMM_TYPES: dict[FormatName, str] = {
    "dense": "bfloat16",
    "int8": "int8_wo",
    "w8a8": "sq",
    "fp8_a8": "fp8",
    "int4": "int4_wo",
}
# What a format without a table is scaled from, nearest first.
_SCALED_FROM: dict[FormatName, tuple[FormatName, ...]] = {
    "int8": ("dense",),
    "int4": ("dense",),
    "int3": ("int4", "dense"),
    **dict.fromkeys(ANY_PRECISION.values(), ("int4", "dense")),
}
# Linears that read the same values, which serving engines store and multiply as one.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class OperatorTables:
    """A LatencySource and a CollectiveSource. `folder`: the package's `systems`; `version`: the package's. `engine`: as whom layers
    are run, one of `operator_data.ENGINES`, whose tables are then taken first; None: as the runtime does.
    """

    folder: Path
    version: str
    engine: str | None = None

    @classmethod
    def installed(cls) -> Self | None:
        """The tables of the installed package; None without it."""
        found = util.find_spec(PACKAGE.replace("-", "_"))
        if found is None or not found.submodule_search_locations:
            return None
        return cls(Path(found.submodule_search_locations[0]) / "systems", metadata.version(PACKAGE))

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed | None:
        system = self._system(rates)
        if system is None or layer.state or any(each.copies > 1 or not each.quantizable for each in layer.linears):
            return None
        linears, attention = self._linears(layer, format_name, rates, phase), self._attention(layer, rates, phase)
        if linears is None or attention is None:
            return None
        seconds = linears[0] + attention[0] + _elementwise_seconds(self.folder, system, layer, phase.total_tokens)
        if self.engine is None:  # engines replay a step's launches as one CUDA graph
            seconds = max(seconds, rates.profile.layer_overhead_seconds)
        return Timed(seconds, self._source(system, linears[1], attention[1]) + linears[2])

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed | None:
        system = self._system(rates)
        gemm = gemms(self.folder, system, GEMM_TYPES["dense"], self.engine) if system else None
        if system is None or gemm is None or model.head_format != "dense":
            return None
        seconds = gemm.axes.at(model.vocab_size, model.embedding_size, sequences) * 1e-3
        return Timed(seconds, self._source(system, gemm.measured_with))

    def step(self, model: Model, rates: Rates, phase: Phase) -> None:  # noqa: ARG002  an engine's, not a kernel's
        return None

    def linear(
        self, device: str, format_name: FormatName, out_features: int, in_features: int, rows: int
    ) -> Timed | None:
        """One linear alone, whatever the device's profile. `device`: a catalogue name."""
        system = SYSTEMS.get(device)
        gemm = gemms(self.folder, system, GEMM_TYPES.get(format_name, "")) if system else None
        if system is None or gemm is None:
            return None
        return Timed(gemm.axes.at(out_features, in_features, rows) * 1e-3, self._source(system, gemm.measured_with))

    def gemm_axes(self, device: str, format_name: FormatName) -> Axis | None:
        """Milliseconds by outputs, inputs and rows, for judging the tables. `device`: a catalogue name."""
        system = SYSTEMS.get(device)
        found = gemms(self.folder, system, GEMM_TYPES.get(format_name, "")) if system else None
        return found.axes if found else None

    def all_reduce(self, device: str, degree: int, size_bytes: int) -> Timed | None:
        """Of `size_bytes` of 16-bit values over `degree` devices of one node, by NCCL or by the engine's own kernel."""
        system = COLLECTIVES.get(device)
        table = self._all_reduces(system) if system else None
        if system is None or table is None or degree not in table.axes.points:
            return None
        return Timed(table.axes.at(degree, size_bytes) * 1e-3, self._source(system, table.measured_with))

    def _all_reduces(self, system: str) -> Table | None:
        if self.engine is None:
            return all_reduces(self.folder, system)
        return engine_all_reduces(self.folder, system, self.engine)

    def _system(self, rates: Rates) -> str | None:
        """None where the device is unknown here, was described by the user, or computes otherwise than the tables."""
        system = SYSTEMS.get(rates.name)
        known = system is not None and rates.compute_type != "float32"
        return system if known and _is_published(rates.name, rates.profile) else None

    def _linears(
        self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase
    ) -> tuple[float, str, str] | None:
        """Seconds, what they were measured with, and the words for what they were scaled from."""
        rows = phase.total_tokens
        scaled_from = _SCALED_FROM.get(format_name, ()) if format_name in rates.profile.decode_efficiency else ()
        for base in (format_name, *scaled_from):
            gemm = gemms(self.folder, SYSTEMS[rates.name], GEMM_TYPES.get(base, ""), self.engine)
            if gemm is None:
                continue
            linears = layer.linears if self.engine is None else _fused(layer.linears)
            measured = [self._product(gemm.axes, each, base, rates, rows) for each in linears]
            if base == format_name:
                return sum(measured), gemm.measured_with, ""
            scales = (
                linear_seconds(each, format_name, rates, rows) / linear_seconds(each, base, rates, rows)
                for each in linears
            )
            seconds = sum(one * scale for one, scale in zip(measured, scales, strict=True))
            return seconds, gemm.measured_with, f", {format_name} scaled from {base}"
        return None

    def _product(self, axes: Axis, linear: Linear, format_name: FormatName, rates: Rates, rows: int) -> float:
        """Seconds. Tables of 8-bit floats hold two passes over the activations: one that finds a scale for all of them, one that rounds.
        The first is taken off (as the package does for `fp8_static`), because here each row has a scale, found while it is rounded.
        What is left takes at least as long as the device's peaks say.
        """
        seconds = axes.at(linear.out_features, linear.in_features, rows) * 1e-3
        found = scale_searches(self.folder, SYSTEMS[rates.name], self.engine) if format_name == "fp8_a8" else None
        if found is None:
            return seconds
        weights = linear.out_features * linear.in_features
        least = max(
            weights / rates.profile.bandwidth_bytes_per_second,
            rows * weights / rates.profile.flops_per_second,  # that of 16 bits: units of 8 bits do twice as many
        )
        return max(seconds - found.axes.at(linear.in_features, rows) * 1e-3, least)

    def _attention(self, layer: LayerShape, rates: Rates, phase: Phase) -> tuple[float, str] | None:
        """Seconds, and what they were measured with."""
        kind = "generation" if phase.decoding else "context"
        table = attentions(self.folder, SYSTEMS[rates.name], kind, rates.kv_bits, self.engine)
        if table is None or layer.head_dim not in table.axes.points:
            return None
        shape = (layer.head_dim, layer.heads / layer.kv_heads, layer.heads, phase.sequences)
        if phase.decoding:
            return table.axes.at(*shape, phase.context) * 1e-3, table.measured_with
        past = max(0.0, phase.context - phase.tokens / 2)
        end = past + phase.tokens
        milliseconds = table.axes.at(*shape, end) * end - (table.axes.at(*shape, past) * past if past >= 1 else 0.0)
        return max(0.0, milliseconds) * 1e-3, table.measured_with

    def _source(self, system: str, *measured_with: str) -> str:
        run_by = f" as {self.engine} runs them" if self.engine else ""
        tables = " and ".join(dict.fromkeys(measured_with))
        return f"operator tables of {PACKAGE} {self.version}{run_by}: {system}, {tables}"


def _fused(linears: Sequence[Linear]) -> list[Linear]:
    """With those of one input as one linear of all their outputs."""
    joined: dict[str, Linear] = {}
    for each in linears:
        name = _FUSED.get(each.name, each.name)
        outputs = joined[name].out_features if name in joined else 0
        joined[name] = msgspec.structs.replace(each, name=name, out_features=outputs + each.out_features)
    return list(joined.values())


def _is_published(name: str, profile: DeviceProfile) -> bool:
    """Whether these are the catalogue's own rates, whatever the memory."""
    own = _published(name)
    return own is not None and msgspec.structs.replace(own, memory_bytes=profile.memory_bytes) == profile


@cache
def _published(name: str) -> DeviceProfile | None:
    return catalogue().profile(name) if name in catalogue().devices else None


def _elementwise_seconds(folder: Path, system: str, layer: LayerShape, tokens: int) -> float:
    """Norms read and write the residual and the hidden states; the activation reads what the MLP's first half wrote; norms of queries
    and keys read and write these.
    """
    described = gpu(folder, system)
    sizes = {each.name: each for each in layer.linears}
    hidden, inner = sizes["o_proj"].out_features, sizes["down_proj"].in_features
    passes, values = 3, 2 * 4 * hidden + layer.mlp_width + inner
    norms_of_heads = 2 * layer.head_dim
    if layer.other_parameters == 2 * hidden + norms_of_heads:
        passes, values = passes + 2, values + 2 * (layer.heads + layer.kv_heads) * layer.head_dim
    bandwidth = float(described["mem_bw"]) * float(described["mem_bw_empirical_scaling_factor"])
    bytes_moved = tokens * values * COMPUTE_TYPE_BYTES["bfloat16"]
    return bytes_moved / bandwidth + passes * float(described["mem_empirical_constant_latency"])
