"""Seconds from measured operator tables: the data of the PyPI package `aiconfigurator-core` (extra `profiles`).

Chosen by the command line where the package is installed; asked by `latency` and `communication`. The tables hold kernels of
serving engines (TensorRT-LLM, vLLM, SGLang) on A100, H100, H200, L40S and B200: what good kernels reach on the device, not
what the runtime's own reach, which `strata profile` measures. A layer is

    its linears      GEMM tables, one look-up each, at m = all tokens of the micro-batch
    + attention      of its query heads, KV heads and width; tokens past the first ones of a prompt by difference
    + elementwise    two norms with residual and the activation: bytes / (0.8 x bandwidth) + 3 us each, as the package counts

but never less than the device's profile says that launching a layer takes: the tables were measured inside CUDA graphs, which
the runtime has not. They were measured with one weight again and again: linears that fit a device's cache (96 MB on L40S) are
faster there than a model's layers, one after the other. A format that a device's tables lack is scaled from one that they have
by the roofline's ratio, linear by linear, and the source's name says so: formats of one device are compared on one ground.
Nothing is said (None) about experts, float32, KV below 16 bits, and devices that were not measured or whose rates the user
gave. Only pyarrow is imported, and
that when the first table is read: the package itself (pandas, a compiled extension) never is.
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Self

import msgspec

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import ANY_PRECISION, COMPUTE_TYPE_BYTES, FormatName
from strata_planner.costs.interpolation import Axis
from strata_planner.costs.operator_data import all_reduces, attentions, gemms, gpu
from strata_planner.costs.roofline import linear_seconds
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.question.catalogue import catalogue
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


@dataclass(frozen=True)
class OperatorTables:
    """A LatencySource and a CollectiveSource. `folder`: the package's `systems`; `version`: the package's."""

    folder: Path
    version: str

    @classmethod
    def installed(cls) -> Self | None:
        """The tables of the installed package; None without it."""
        found = util.find_spec(PACKAGE.replace("-", "_"))
        if found is None or not found.submodule_search_locations:
            return None
        return cls(Path(found.submodule_search_locations[0]) / "systems", metadata.version(PACKAGE))

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed | None:
        system = self._system(rates)
        if system is None or any(each.copies > 1 or not each.quantizable for each in layer.linears):
            return None
        linears, attention = self._linears(layer, format_name, rates, phase), self._attention(layer, system, phase)
        if linears is None or attention is None:
            return None
        seconds = linears[0] + attention[0] + _elementwise_seconds(self.folder, system, layer, phase.total_tokens)
        seconds = max(seconds, rates.profile.layer_overhead_seconds)
        return Timed(seconds, self._source(system, linears[1], attention[1]) + linears[2])

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed | None:
        system = self._system(rates)
        gemm = gemms(self.folder, system, GEMM_TYPES["dense"]) if system else None
        if system is None or gemm is None:
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
        """Of `size_bytes` of 16-bit values over `degree` devices of one node, by NCCL."""
        system = COLLECTIVES.get(device)
        table = all_reduces(self.folder, system) if system else None
        if system is None or table is None or degree not in table.axes.points:
            return None
        return Timed(table.axes.at(degree, size_bytes) * 1e-3, self._source(system, table.measured_with))

    def _system(self, rates: Rates) -> str | None:
        """None where the device is unknown here, was described by the user, or computes otherwise than the tables."""
        system = SYSTEMS.get(rates.name)
        known = system is not None and rates.compute_type != "float32" and rates.kv_bits == 16
        return system if known and _is_published(rates.name, rates.profile) else None

    def _linears(
        self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase
    ) -> tuple[float, str, str] | None:
        """Seconds, what they were measured with, and the words for what they were scaled from."""
        rows = phase.total_tokens
        scaled_from = _SCALED_FROM.get(format_name, ()) if format_name in rates.profile.decode_efficiency else ()
        for base in (format_name, *scaled_from):
            gemm = gemms(self.folder, SYSTEMS[rates.name], GEMM_TYPES.get(base, ""))
            if gemm is None:
                continue
            measured = [gemm.axes.at(each.out_features, each.in_features, rows) * 1e-3 for each in layer.linears]
            if base == format_name:
                return sum(measured), gemm.measured_with, ""
            scales = (
                linear_seconds(each, format_name, rates, rows) / linear_seconds(each, base, rates, rows)
                for each in layer.linears
            )
            seconds = sum(one * scale for one, scale in zip(measured, scales, strict=True))
            return seconds, gemm.measured_with, f", {format_name} scaled from {base}"
        return None

    def _attention(self, layer: LayerShape, system: str, phase: Phase) -> tuple[float, str] | None:
        """Seconds, and what they were measured with."""
        table = attentions(self.folder, system, "generation" if phase.decoding else "context")
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
        return f"operator tables of {PACKAGE} {self.version}: {system}, {' and '.join(dict.fromkeys(measured_with))}"


def _is_published(name: str, profile: DeviceProfile) -> bool:
    """Whether these are the catalogue's own rates, whatever the memory."""
    own = _published(name)
    return own is not None and msgspec.structs.replace(own, memory_bytes=profile.memory_bytes) == profile


@cache
def _published(name: str) -> DeviceProfile | None:
    return catalogue().profile(name) if name in catalogue().devices else None


def _elementwise_seconds(folder: Path, system: str, layer: LayerShape, tokens: int) -> float:
    """Norms read and write the residual and the hidden states; the activation reads what the MLP's first half wrote."""
    described = gpu(folder, system)
    sizes = {each.name: each for each in layer.linears}
    hidden, inner = sizes["o_proj"].out_features, sizes["down_proj"].in_features
    values = tokens * (2 * 4 * hidden + layer.mlp_width + inner)
    bandwidth = float(described["mem_bw"]) * float(described["mem_bw_empirical_scaling_factor"])
    return values * COMPUTE_TYPE_BYTES["bfloat16"] / bandwidth + 3 * float(described["mem_empirical_constant_latency"])
