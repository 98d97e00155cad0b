"""Seconds from measured operator tables: the data of the PyPI package `aiconfigurator-core` (extra `profiles`).

Chosen by the command line where the package is installed; asked by `latency` and `communication`. The tables hold kernels of
serving engines (TensorRT-LLM, vLLM, SGLang) on A100, H100, H200, L40S and B200: what good kernels reach on the device, not
what the runtime's own reach, which `strata profile` measures. A layer is

    its linears      GEMM tables, one look-up each, at m = all tokens of the micro-batch
    + attention      of its query heads, KV heads and width; tokens past the first ones of a prompt by difference
    + elementwise    two norms with residual and the activation: bytes / (0.8 x bandwidth) + 3 us each, as the package counts

but never less than the device's profile says that launching a layer takes: the tables were measured inside CUDA graphs, which
the runtime has not. They were measured with one weight again and again: linears that fit a device's cache (96 MB on L40S) are
faster there than a model's layers, one after the other. Nothing is said (None) about experts, float32, KV below
16 bits, 3-bit weights, devices whose rates the user gave, and formats that a device's tables lack. Only pyarrow is imported, and
that when the first table is read: the package itself (pandas, a compiled extension) never is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, Self

import msgspec
import yaml

from strata_planner.catalogue import catalogue
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, FormatName
from strata_planner.costs.interpolation import Axis
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.model import LayerShape, Model

PACKAGE = "aiconfigurator-core"
# Catalogue name -> the package's system. An A800 is an A100 with slower links: its collectives are not asked for.
SYSTEMS = {
    "A100-80GB": "a100_sxm",
    "A800-80GB": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "L40S": "l40s",
    "B200": "b200_sxm",
}
WITHOUT_COLLECTIVES = frozenset({"A800-80GB"})
# Our format -> the tables' type of GEMM: 16 bits; int8 weights, 16-bit activations; int8 both (SmoothQuant); int4 weights.
GEMM_TYPES: dict[FormatName, str] = {"dense": "bfloat16", "int8": "int8_wo", "w8a8": "sq", "int4": "int4_wo"}
_FRAMEWORKS = ("trtllm", "vllm", "sglang")  # in order of preference: the first has attention of any number of KV heads


@dataclass(frozen=True)
class Table:
    """Measured milliseconds over some axes, and the engine and version that they were measured with."""

    axes: Axis
    measured_with: str


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
        gemm, attention = (
            _gemms(self.folder, system, GEMM_TYPES.get(format_name, "")),
            self._attention(layer, system, phase),
        )
        if gemm is None or attention is None:
            return None
        linears = sum(
            gemm.axes.at(each.out_features, each.in_features, phase.total_tokens) * 1e-3 for each in layer.linears
        )
        seconds = linears + attention[0] + _elementwise_seconds(self.folder, system, layer, phase.total_tokens)
        seconds = max(seconds, rates.profile.layer_overhead_seconds)
        return Timed(seconds, self._source(system, gemm.measured_with, attention[1]))

    def head(self, model: Model, rates: Rates, sequences: int) -> Timed | None:
        system = self._system(rates)
        gemm = _gemms(self.folder, system, GEMM_TYPES["dense"]) if system else None
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
        gemm = _gemms(self.folder, system, GEMM_TYPES.get(format_name, "")) if system else None
        if system is None or gemm is None:
            return None
        return Timed(gemm.axes.at(out_features, in_features, rows) * 1e-3, self._source(system, gemm.measured_with))

    def gemms(self, device: str, format_name: FormatName) -> Axis | None:
        """Milliseconds by outputs, inputs and rows, for judging the tables. `device`: a catalogue name."""
        system = SYSTEMS.get(device)
        found = _gemms(self.folder, system, GEMM_TYPES.get(format_name, "")) if system else None
        return found.axes if found else None

    def all_reduce(self, device: str, degree: int, size_bytes: int) -> Timed | None:
        """Of `size_bytes` of 16-bit values over `degree` devices of one node, by NCCL."""
        system = SYSTEMS.get(device)
        table = _all_reduces(self.folder, system) if system and device not in WITHOUT_COLLECTIVES else None
        if system is None or table is None or degree not in table.axes.points:
            return None
        return Timed(table.axes.at(degree, size_bytes) * 1e-3, self._source(system, table.measured_with))

    def _system(self, rates: Rates) -> str | None:
        """None where the device is unknown here, was described by the user, or computes otherwise than the tables."""
        system = SYSTEMS.get(rates.name)
        known = system is not None and rates.compute_type != "float32" and rates.kv_bits == 16
        return system if known and _is_published(rates.name, rates.profile) else None

    def _attention(self, layer: LayerShape, system: str, phase: Phase) -> tuple[float, str] | None:
        """Seconds, and what they were measured with."""
        table = _attentions(self.folder, system, "generation" if phase.decoding else "context")
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
    gpu = _gpu(folder, system)
    sizes = {each.name: each for each in layer.linears}
    hidden, inner = sizes["o_proj"].out_features, sizes["down_proj"].in_features
    values = tokens * (2 * 4 * hidden + layer.mlp_width + inner)
    bandwidth = float(gpu["mem_bw"]) * float(gpu["mem_bw_empirical_scaling_factor"])
    return values * COMPUTE_TYPE_BYTES["bfloat16"] / bandwidth + 3 * float(gpu["mem_empirical_constant_latency"])


@cache
def _gpu(folder: Path, system: str) -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((folder / f"{system}.yaml").read_text(encoding="utf-8"))["gpu"]
    return described


@cache
def _gemms(folder: Path, system: str, gemm_type: str) -> Table | None:
    """Axes: outputs, inputs, rows."""
    for file, measured_with in _files(folder, system, "gemm", "gemm_perf") if gemm_type else ():
        columns = _columns(file, ("n", "k", "m", "latency"), [("gemm_dtype", "==", gemm_type)])
        if columns:
            return Table(Axis.of(columns), measured_with)
    return None


@cache
def _attentions(folder: Path, system: str, phase: str) -> Table | None:
    """Axes: head width, query heads per KV head, query heads, sequences, then keys before the token (generation) or tokens
    (context, whose values are per token, because their times grow with its square).
    """
    names = ("head_dim", "num_heads", "num_key_value_heads", "batch_size", "isl", "step", "latency")
    types = [("attn_dtype", "==", "bfloat16"), ("kv_cache_dtype", "==", "bfloat16")]
    for file, measured_with in _files(folder, system, "attention", f"{phase}_attention_perf"):
        rows = _columns(file, names, types)
        if rows:
            generation = phase == "generation"
            return Table(
                Axis.of(
                    (
                        width,
                        heads / kv_heads,
                        heads,
                        batch,
                        step if generation else tokens,
                        time if generation else time / tokens,
                    )
                    for width, heads, kv_heads, batch, tokens, step, time in rows
                ),
                measured_with,
            )
    return None


@cache
def _all_reduces(folder: Path, system: str) -> Table | None:
    """Axes: devices, bytes."""
    for version in _newest_first(folder / "data" / system / "comm" / "nccl"):
        types = [("op_name", "==", "all_reduce"), ("nccl_dtype", "==", "half")]
        rows = _columns(version / "nccl_perf.parquet", ("num_gpus", "message_size", "latency"), types)
        if rows:
            return Table(Axis.of(rows), f"NCCL {version.name}")
    return None


def _files(folder: Path, system: str, family: str, name: str) -> Iterator[tuple[Path, str]]:
    """Tables of a family with their engine and version, the preferred engine and its newest version first."""
    for framework in _FRAMEWORKS:
        for version in _newest_first(folder / "data" / system / family / framework):
            yield version / f"{name}.parquet", f"{framework} {version.name}"


def _newest_first(folder: Path) -> list[Path]:
    versions = folder.iterdir() if folder.is_dir() else ()
    return sorted(versions, key=lambda each: [int(part) for part in re.findall(r"\d+", each.name)], reverse=True)


def _columns(file: Path, names: tuple[str, ...], where: list[tuple[str, str, str]]) -> list[tuple[float, ...]]:
    """Rows of the named columns that fulfil `where` and see all keys (no sliding window); none without such a file."""
    if not file.is_file():
        return []
    parquet: Any = import_module("pyarrow.parquet")
    schema = parquet.read_schema(file).names
    conditions: list[tuple[str, str, str | int]] = [*where]
    conditions += [("window_size", "==", 0)] if "window_size" in schema else []
    table = parquet.read_table(file, columns=list(names), filters=conditions)
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
