"""What `strata quantize` costs: seconds per weight and peak memory of the whole command, without a text, with one, and with tables fitted to its inputs.

`python -m benchmarks.quality_cost [--tokens N] [--json FILE]`: some two minutes on two quiet cores. A random model of two layers as a model of 1B parameters has them, so
that K is 2,048 and 5,632; the text's share grows with its tokens, the other two do not. Seconds of processors beside those of the clock: a busy machine changes the
latter alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.quality import MODEL, TEXT
from benchmarks.rows import Row, run
from strata_runtime.model.random_model import make_random_model

SHAPES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
THREADS = 2
TOKENS = 2048
_MIB = 1 << 20


@dataclass(frozen=True)
class Spent:
    """By one command: seconds of the clock and of processors, and its peak resident memory."""

    seconds: float
    processor_seconds: float
    peak_bytes: int

    @property
    def measured(self) -> dict[str, float]:
        """By the ending of a row's name."""
        return {
            "seconds_per_parameter": self.seconds / _weights(),
            "processor_seconds_per_parameter": self.processor_seconds / _weights(),
            "peak_memory": self.peak_bytes / _MIB,
        }


def measure(tokens: int) -> list[Row]:
    text = ["--text", str(MODEL / TEXT), "--tokens", str(tokens)]
    commands: dict[str, list[str]] = {"plain": [], "calibrated": [*text, "--no-refit"], "refitted": text}
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_random_model(Path(scratch) / "model", "llama", dtype=torch.bfloat16, **SHAPES)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, folder)
        spent = {name: _spent(folder, Path(scratch) / name, more) for name, more in commands.items()}
    rows = []
    for (name, mine), peer in zip(spent.items(), (None, "plain", "calibrated"), strict=True):
        other = spent[peer] if peer else None
        for row, value in mine.measured.items():
            before = other.measured[row] if other else None
            unit = f"s, {THREADS} threads" if row == "seconds_per_parameter" else "s" if "seconds" in row else "MiB"
            ratio = value / before if before else None
            rows.append(Row(f"quantize_{name}_{row}", value, unit, peer, before, ratio))
    return rows


def _spent(model: Path, output: Path, more: list[str]) -> Spent:
    command = [
        sys.executable,
        "-m",
        "strata_runtime.tools.quantize",
        str(model),
        "--threads",
        str(THREADS),
        "--output",
        str(output),
    ]
    started = time.perf_counter()
    with subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join([*command, *more])} ended with {process.returncode}; run it to see why")
    return Spent(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)


def _weights() -> int:
    """Of the linears of all layers."""
    hidden, inner = SHAPES["hidden_size"], SHAPES["intermediate_size"]
    keys = hidden * SHAPES["num_key_value_heads"] // SHAPES["num_attention_heads"]
    return SHAPES["num_hidden_layers"] * hidden * (2 * hidden + 2 * keys + 3 * inner)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the text, at most")
    chosen, rest = parser.parse_known_args()
    run("quality_cost", lambda: measure(chosen.tokens), rest)


if __name__ == "__main__":
    main()
