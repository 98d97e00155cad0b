"""Loads that keep what they quantize: one that keeps nothing, the first that keeps, and the next one, on a random model of 103 million weights.

`python -m benchmarks.load_cache [--json FILE] [--formats any3 any4 ...] [--repeats N]`, four minutes on a quiet core; 0.4 GB of disk, removed
afterwards. Every load is a process of its own with one thread (`benchmarks.load_once`), its files in the page cache; seconds are of all its threads
on the processor and by the clock, the best of the repeats. The first load finds an empty cache, the next one what that left. Peaks, the largest of
the repeats, count what the process holds beyond what it held before.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.loading import loading
from benchmarks.memory import PeakWatch
from benchmarks.rows import Row, run
from strata_runtime.model.random_model import make_random_model

FORMATS = ("any3", "any4", "any8")
WAYS = {"keeps nothing": "stream", "first": "keep", "next": "keep"}
SHAPES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 4096,
}
LAYER_BYTES = 2 * (4 * 1024 * 1024 + 3 * 1024 * 2816)  # the linears of one layer in bfloat16
_MIB = 1 << 20


def measure(formats: Sequence[str], repeats: int) -> list[Row]:
    shown = Table(title="103 million weights, one thread, files in the page cache", title_justify="left")
    for place, column in enumerate(("format", "load", "processor s", "s", "peak MiB", "kept and 3 layers, MiB")):
        shown.add_column(column, justify="right" if place > 1 else "left")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        model, cache = Path(scratch, "model"), Path(scratch, "cache")
        make_random_model(model, "llama", dtype=torch.bfloat16, **SHAPES)
        for name in formats:
            told = [_told(model, cache, name) for _ in range(repeats)]
            alone = min(each["keeps nothing"]["processor_seconds"] for each in told)
            for what in WAYS:
                loads = [each[what] for each in told]
                busy, seconds = (min(load[unit] for load in loads) for unit in ("processor_seconds", "seconds"))
                peak, allowed = max(load["peak_bytes"] for load in loads), loads[0]["stored_bytes"] + 3 * LAYER_BYTES
                shown.add_row(
                    name, what, f"{busy:.2f}", f"{seconds:.2f}", f"{peak / _MIB:.0f}", f"{allowed / _MIB:.0f}"
                )
                suffix = f"{name}_{what.replace(' ', '_')}"
                rows += [
                    Row(f"load_{suffix}", busy, "s", "a load that keeps nothing", alone, busy / alone),
                    Row(
                        f"load_peak_{suffix}",
                        peak / _MIB,
                        "MiB",
                        "quantized size + 3 layers",
                        allowed / _MIB,
                        peak / allowed,
                    ),
                ]
    Console(width=120).print(shown)
    return rows


def _told(model: Path, cache: Path, name: str) -> dict[str, dict[str, Any]]:
    """What each load of WAYS says of itself, one after the other, with its peak."""
    shutil.rmtree(cache, ignore_errors=True)
    answers: dict[str, dict[str, Any]] = {}
    for what, way in WAYS.items():
        with (
            loading(way, name, model, {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}) as (process, load),
            PeakWatch({what: process.pid}) as watch,
        ):
            told = load()
        assert what != "first" or any(cache.rglob("*.safetensors")), "nothing was kept; is there room in $TMPDIR?"
        peak = max(watch.peaks[what] - told["idle_bytes"], told["held_bytes"])
        answers[what] = told | {"peak_bytes": peak}
    return answers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_cache", add_help=False)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--repeats", type=int, default=3)
    chosen, rest = parser.parse_known_args(arguments)
    run("load_cache", lambda: measure(chosen.formats, chosen.repeats), rest)


if __name__ == "__main__":
    main()
