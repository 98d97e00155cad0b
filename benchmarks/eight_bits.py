"""What eight bits cost: perplexity of our model with its KV cache at 8 bits and with 8-bit activations, calibrated in every way.

`python -m benchmarks.eight_bits [--json FILE]`: four minutes on one quiet core. Computed by the pipeline's own stages in float32, over the same text and windows as
`benchmarks.perplexity`; the peer of each row is the model at 16 bits. Activations are calibrated on modules of Python's standard library, of
which the model's own training text was made. Formats that need no calibration stand in `benchmarks.quality` too.
"""

import argparse
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.perplexity import CONTEXT, MODEL, SLOTS, texts
from benchmarks.rows import Row, run
from strata_planner.contract.formats import FormatName
from strata_planner.contract.model_folder import ACTIVATIONS_FILE
from strata_runtime.formats.quantizers import quantize_channels
from strata_runtime.formats.reference import quantize_tokens
from strata_runtime.formats.rounded import rounded_linear
from strata_runtime.formats.rounded.channel_kernels import int8_sums
from strata_runtime.formats.rounded.rounded_linear import ChannelLinear
from strata_runtime.slot.chain import StageChain
from strata_runtime.tools.calibration.activation_calibration import Recipe, calibrate_activations
from strata_runtime.tools.calibration.activation_histogram import CalibrationMethod
from strata_runtime.tools.calibration.text import read_windows
from tests.runtime.plans import even_plan

LAYERS = 12
CALIBRATION_MODULES = ("argparse", "tarfile", "subprocess", "typing", "inspect", "doctest")
CALIBRATION_TOKENS = 8192
SMOOTHINGS: tuple[float | str | None, ...] = (None, 0.5, "search")


@dataclass(frozen=True)
class Subject:
    """A copy of the model's folder that a calibration may be written into, and the texts that perplexity is measured on."""

    folder: Path
    texts: Sequence[Sequence[int]]

    def perplexity(self, format_name: FormatName, kv_bits: int = 16) -> float:
        """Over three stages, every layer in the format."""
        pages = -(-(CONTEXT + 1) // 16)
        formats = [format_name] * LAYERS
        plan = even_plan(self.folder, SLOTS, formats=formats, pages=pages, max_model_len=CONTEXT + 1, kv_bits=kv_bits)
        chain = StageChain.load(plan, self.folder)
        total = sum(float(chain.score(text).double().sum()) for text in self.texts)
        return math.exp(-total / sum(len(text) - 1 for text in self.texts))

    def calibrate(self, windows: Sequence[Tensor], recipe: Recipe) -> None:
        calibrate_activations(self.folder, windows, recipe).write(self.folder / ACTIVATIONS_FILE)


def measure(every: int) -> list[Row]:
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        for file in MODEL.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        subject = Subject(folder, texts(MODEL)[::every])
        whole = subject.perplexity("dense")
        row = partial(_row, whole=whole)
        rows = [
            row("kv8", subject.perplexity("dense", kv_bits=8)),
            row("w8a8", subject.perplexity("w8a8")),
            row("w8a8_kv8", subject.perplexity("w8a8", kv_bits=8)),
        ]
        # What is never served: one scale for a whole weight, one for all tokens of a batch.
        with patch.object(rounded_linear, "quantize_channels", partial(quantize_channels, sharing="tensor")):
            rows.append(row("w8a8_scale_per_weight", subject.perplexity("w8a8")))
        with patch.object(ChannelLinear, "multiply", _per_batch):
            rows.append(row("w8a8_scale_per_batch", subject.perplexity("w8a8")))
        windows = read_windows(MODEL, _calibration_text(Path(scratch)), CONTEXT, CALIBRATION_TOKENS, 0).calibration
        for method in get_args(CalibrationMethod):
            for smoothing in SMOOTHINGS:
                subject.calibrate(windows, Recipe(method, smoothing))
                rows.append(row(f"w8a8_static_{method}_{smoothing or 'plain'}", subject.perplexity("w8a8_static")))
        return rows


def _row(name: str, value: float, *, whole: float) -> Row:
    return Row(name, value, "per token", "the same stages at 16 bits", whole, value / whole)


def _calibration_text(scratch: Path) -> Path:
    """The sources of some modules, one document each."""
    text = scratch / "calibration.txt"
    found = (importlib.util.find_spec(name) for name in CALIBRATION_MODULES)
    sources = [Path(spec.origin).read_text(encoding="utf-8") for spec in found if spec and spec.origin]
    text.write_text("\n\f\n".join(sources), encoding="utf-8")
    return text


def _per_batch(linear: ChannelLinear, tokens: Tensor) -> Tensor:
    codes, scales = quantize_tokens(tokens, "tensor")
    return (int8_sums(codes, linear.codes).float() * scales * linear.scales).to(tokens.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--every", type=int, default=1, help="measure on every so many-th window only")
    chosen, rest = parser.parse_known_args()
    run("eight_bits", partial(measure, chosen.every), rest)


if __name__ == "__main__":
    main()
