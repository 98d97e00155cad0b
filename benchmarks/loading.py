"""Streaming load against load-then-quantize: time and peak private memory, for every format, on a random model of 1.24 billion parameters.

`python -m benchmarks.loading [--json FILE] [--formats int4 any4 ...] [--folder DIR] [--repeats N]`, some ten minutes on two quiet cores; 2.5 GB of disk
for the model and 1.2 GB for its any-precision copy, removed afterwards (`--folder` keeps both and finds them again).
Every load is a process of its own with two threads, its files in the page cache; times are the best of the repeats, taken in turn. Load-then-quantize
(`benchmarks.load_once`) reads all dense weights first, then stores them layer by layer by the same code. Peaks are of further loads, sampled from
outside, and count what the process holds beyond what it held before.
`any4` and the like come from the copy that `strata quantize` makes, `any4 on the fly` is quantized while it loads.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.memory import PeakWatch
from benchmarks.rows import Row, run
from strata_runtime.model.random_model import make_random_model

THREADS = 2
ON_THE_FLY = " on the fly"
FORMATS = ("dense", "int8", "w8a8", "int4", "int3", "fp8_e4m3", "any3", "any4", "any8", "any4" + ON_THE_FLY)
LAYERS = 16
SHAPES: dict[str, Any] = {  # of Llama 3.2 1B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LAYER_BYTES = 2 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)  # the linears of one layer in bfloat16
_GIB = 1 << 30


@dataclass(frozen=True)
class Load:
    """One way of loading one format: the best seconds by the clock and of all processors, the peak and what stays."""

    seconds: float
    processor_seconds: float
    peak_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class Measured:
    name: str
    stream: Load
    whole: Load

    @property
    def time_ratio(self) -> float:
        return self.stream.seconds / self.whole.seconds

    @property
    def peak_ratio(self) -> float:
        """Over what is kept and three dense layers."""
        return self.stream.peak_bytes / (self.stream.stored_bytes + 3 * LAYER_BYTES)


class Folders:
    """The model with its any-precision copy, and the same model without one."""

    def __init__(self, root: Path) -> None:
        self.model, self.bare = root / "model", root / "bare"
        self.empty_cache = root / "cache"

    def of(self, name: str) -> Path:
        return self.bare if name.endswith(ON_THE_FLY) else self.model

    def make(self, formats: Sequence[str]) -> None:
        """What is missing of it."""
        if not (self.model / "model.safetensors").is_file():
            _tell("making the model")
            make_random_model(self.model, "llama", dtype=torch.bfloat16, shard_bytes=1 << 40, **SHAPES)
        self.bare.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            if not (self.bare / name).exists():
                (self.bare / name).symlink_to(self.model / name)
        if any(name.startswith("any") and not name.endswith(ON_THE_FLY) for name in formats):
            _tell("making its any-precision copy")
            command = [
                sys.executable,
                "-m",
                "strata_runtime.tools.quantize",
                str(self.model),
                "--threads",
                str(THREADS),
            ]
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | self.environment)
            _tell(f"made in {time.perf_counter() - started:.0f} seconds")

    @property
    def environment(self) -> dict[str, str]:
        return {"XDG_CACHE_HOME": str(self.empty_cache), "OMP_NUM_THREADS": str(THREADS)}


@contextmanager
def loading(
    way: str, name: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], Callable[[], dict[str, Any]]]]:
    """A process that is ready to load, and what makes it do so and gives its account (`benchmarks.load_once`)."""
    command = [sys.executable, "-m", "benchmarks.load_once", way, name, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload]
    assert process.stdin
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n", f"{command} did not start"
        _into_page_cache(folder)

        def load() -> dict[str, Any]:
            process.stdin.write("\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer

        yield process, load
    finally:
        process.communicate("\n")


def _into_page_cache(folder: Path) -> None:
    buffer = bytearray(1 << 24)
    for path in folder.rglob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_format(folders: Folders, name: str, repeats: int) -> Measured:
    seconds: dict[str, list[tuple[float, float]]] = {"stream": [], "whole": []}
    what = name.removesuffix(ON_THE_FLY), folders.of(name), folders.environment
    for _ in range(repeats):
        for way, taken in seconds.items():
            with loading(way, *what) as (_, load):
                told = load()
                taken.append((told["seconds"], told["processor_seconds"]))
    loads = {}
    for way, taken in seconds.items():
        with loading(way, *what) as (process, load):
            with PeakWatch({way: process.pid}) as watch:
                told = load()
            peak = max(watch.peaks[way] - told["idle_bytes"], told["held_bytes"])
            seconds_each, busy_each = zip(*taken, strict=True)
            loads[way] = Load(min(seconds_each), min(busy_each), peak, told["stored_bytes"])
    measured = Measured(name, loads["stream"], loads["whole"])
    _tell(f"{name}: time {measured.time_ratio:.2f}, peak {measured.peak_ratio:.2f}")
    return measured


def rows(measured: Sequence[Measured]) -> list[Row]:
    """The two listed rows are the worst of all formats."""
    slowest = max(measured, key=lambda each: each.time_ratio)
    largest = max(measured, key=lambda each: each.peak_ratio)
    listed = [_time_row("load_time", slowest, f" ({slowest.name}, the worst)")]
    listed.append(_peak_row("load_peak_memory", largest, f" ({largest.name}, the worst)"))
    for each in measured:
        suffix = "_" + each.name.replace(" ", "_")
        listed += [_time_row("load_time" + suffix, each, ""), _peak_row("load_peak_memory" + suffix, each, "")]
    return listed


def _time_row(name: str, of: Measured, what: str) -> Row:
    peer = "load-then-quantize" + what
    return Row(name, of.stream.seconds, "s", peer, of.whole.seconds, of.time_ratio, 1.0, lower_is_better=True)


def _peak_row(name: str, of: Measured, what: str) -> Row:
    allowed = of.stream.stored_bytes + 3 * LAYER_BYTES
    peer = "quantized size + 3 layers" + what
    return Row(name, of.stream.peak_bytes / _GIB, "GiB", peer, allowed / _GIB, of.peak_ratio, 1.0, lower_is_better=True)


def table(measured: Sequence[Measured]) -> Table:
    shown = Table(title="loading 1.24 billion parameters, two threads, page cache warm", title_justify="left")
    columns = (
        "format",
        "kept GiB",
        "stream s",
        "load-then-quantize s",
        "ratio",
        "processor s",
        "load-then-quantize processor s",
        "stream peak GiB",
        "load-then-quantize peak GiB",
    )
    for place, column in enumerate(columns):
        shown.add_column(column, justify="right" if place else "left")
    for each in measured:
        sizes = (each.stream.stored_bytes, each.stream.peak_bytes, each.whole.peak_bytes)
        kept, peak, whole = (f"{size / _GIB:.2f}" for size in sizes)
        seconds = f"{each.stream.seconds:.2f}", f"{each.whole.seconds:.2f}", f"{each.time_ratio:.2f}"
        busy = f"{each.stream.processor_seconds:.2f}", f"{each.whole.processor_seconds:.2f}"
        shown.add_row(each.name, kept, *seconds, *busy, peak, whole)
    return shown


def measure(root: Path | None, formats: Sequence[str], repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        folders = Folders(root or Path(scratch))
        folders.model.parent.mkdir(parents=True, exist_ok=True)
        folders.make(formats)
        measured = [measure_format(folders, name, repeats) for name in formats]
    Console(width=150).print(table(measured))
    return rows(measured)


def _tell(text: str) -> None:
    """Progress, on the way: the whole takes minutes."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", add_help=False)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    chosen, rest = parser.parse_known_args(arguments)
    run("loading", lambda: measure(chosen.folder, chosen.formats, chosen.repeats), rest)


if __name__ == "__main__":
    main()
