"""The files of `aiconfigurator-core` as tables over axes: GEMMs, attention, all-reduces. Read by `operators` when it is asked.

One parquet file per family, engine and version under `systems/data/<system>`; the newest version that has the rows is taken, of the
engine that is asked for, or else of the first of `ENGINES` that has them. A file that is not there is a table that is not known (None).
Knows no layers and no prices.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from strata_planner.costs.interpolation import Axis

ENGINES = ("trtllm", "vllm", "sglang")  # in order of preference: the first has attention of any number of KV heads
_KV_TYPES = {16: "bfloat16", 8: "fp8"}


@dataclass(frozen=True)
class Table:
    """Measured milliseconds over some axes, and the engine and version that they were measured with."""

    axes: Axis
    measured_with: str


@cache
def gpu(folder: Path, system: str) -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((folder / f"{system}.yaml").read_text(encoding="utf-8"))["gpu"]
    return described


@cache
def gemms(folder: Path, system: str, gemm_type: str, engine: str | None = None) -> Table | None:
    """Axes: outputs, inputs, rows."""
    for file, measured_with in _files(folder, system, "gemm", "gemm_perf", engine) if gemm_type else ():
        columns = _columns(file, ("n", "k", "m", "latency"), [("gemm_dtype", "==", gemm_type)])
        if columns:
            return Table(Axis.of(columns), measured_with)
    return None


@cache
def scale_searches(folder: Path, system: str, engine: str | None = None) -> Table | None:
    """Axes: inputs, rows. What an 8-bit float GEMM takes to find one scale for all of its activations."""
    for file, measured_with in _files(folder, system, "quantize", "computescale_perf", engine):
        columns = _columns(file, ("k", "m", "latency"), [("quant_dtype", "==", "fp8")])
        if columns:
            return Table(Axis.of(columns), measured_with)
    return None


@cache
def attentions(folder: Path, system: str, phase: str, kv_bits: int, engine: str | None = None) -> Table | None:
    """Axes: head width, query heads per KV head, query heads, sequences, then keys before the token (generation) or tokens
    (context, whose values are per token, because their times grow with its square). `kv_bits`: 16, or 8 as floats.
    """
    names = ("head_dim", "num_heads", "num_key_value_heads", "batch_size", "isl", "step", "latency")
    types = [("attn_dtype", "==", "bfloat16"), ("kv_cache_dtype", "==", _KV_TYPES[kv_bits])]
    for file, measured_with in _files(folder, system, "attention", f"{phase}_attention_perf", engine):
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
def engine_all_reduces(folder: Path, system: str, engine: str | None = None) -> Table | None:
    """Axes: devices, bytes. By the kernels that serving engines bring for it, in CUDA graphs where they differ. Fewer bytes take no
    longer than more.
    """
    for file, measured_with in _files(folder, system, "comm", "custom_allreduce_perf", engine):
        columns = _columns(file, ("num_gpus", "message_size", "latency"), [("op_name", "==", "all_reduce")])
        if columns:
            return Table(Axis.of(columns).rising(), measured_with)
    return None


@cache
def all_reduces(folder: Path, system: str) -> Table | None:
    """Axes: devices, bytes."""
    for version in newest_first(folder / "data" / system / "comm" / "nccl"):
        types = [("op_name", "==", "all_reduce"), ("nccl_dtype", "==", "half")]
        rows = _columns(version / "nccl_perf.parquet", ("num_gpus", "message_size", "latency"), types)
        if rows:
            return Table(Axis.of(rows), f"NCCL {version.name}")
    return None


def _files(folder: Path, system: str, family: str, name: str, engine: str | None = None) -> Iterator[tuple[Path, str]]:
    """Tables of a family with their engine and version, the engine that is asked for and its newest version first."""
    for framework in sorted(ENGINES, key=lambda each: each != engine):  # stable: the others keep their order
        for version in newest_first(folder / "data" / system / family / framework):
            yield version / f"{name}.parquet", f"{framework} {version.name}"


def newest_first(folder: Path) -> list[Path]:
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
