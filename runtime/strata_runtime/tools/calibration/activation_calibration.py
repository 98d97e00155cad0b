"""Calibrates the activations of a model for `w8a8_static`: `python -m strata_runtime.tools.calibration.activation_calibration MODEL --text FILE`.

One pass, layer by layer, each layer run twice: what enters its linears is seen, smoothing is chosen, and the scale of the smoothed inputs found.
Writes `strata-activations.safetensors` beside the checkpoint, whole or not at all. Knows nothing of plans.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import ComputeType
from strata_planner.contract.model_folder import ACTIVATIONS_FILE
from strata_runtime.allocator import freed_at_once
from strata_runtime.command_line import positive
from strata_runtime.errors import InputError
from strata_runtime.formats.linear import COMPUTE_DTYPES
from strata_runtime.formats.static8.activation_file import ActivationEntry, Activations
from strata_runtime.loading.digest import model_digest
from strata_runtime.loading.uri import resolve_model
from strata_runtime.model.adapter import read_config
from strata_runtime.tools.calibration.activation_histogram import (
    THRESHOLDS,
    CalibrationMethod,
    MagnitudeHistogram,
    scale_of,
)
from strata_runtime.tools.calibration.inputs import inputs_heard
from strata_runtime.tools.calibration.layers import LayeredModel, Piece
from strata_runtime.tools.calibration.smoothing import best_smoothing, smoothing_factors
from strata_runtime.tools.calibration.text import read_windows

SAMPLED_TOKENS = 512  # of a linear's inputs, evenly spaced: what smoothing is chosen on
CPU = torch.device("cpu")
Observe = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Recipe:
    """`method`: how the clipping threshold is found. `smoothing`: alpha of SmoothQuant, "search" for the best of several, None for no smoothing."""

    method: CalibrationMethod = "minmax"
    smoothing: float | str | None = "search"

    def factors(self, inputs: "InputSample", weight: Tensor) -> Tensor:
        """Float32 [K]."""
        if self.smoothing is None:
            return torch.ones_like(inputs.peaks)
        if isinstance(self.smoothing, float):
            return smoothing_factors(inputs.peaks, weight.abs().amax(dim=0).float(), self.smoothing)
        return best_smoothing(inputs.tokens(), weight, inputs.peaks, THRESHOLDS[self.method])[1]


class InputSample:
    """Of what enters one linear: the largest magnitude of every input, float32 [K], and every so many-th token."""

    def __init__(self, in_features: int, every: int, device: torch.device) -> None:
        self.peaks = torch.zeros(in_features, device=device)
        self._every = every
        self._tokens: list[Tensor] = []

    def add(self, inputs: Tensor) -> None:
        """inputs: [tokens, K]."""
        self.peaks = torch.maximum(self.peaks, inputs.abs().amax(dim=0).float())
        self._tokens.append(inputs[:: self._every].clone())

    def tokens(self) -> Tensor:
        return torch.cat(self._tokens)


def calibrate_activations(
    folder: Path,
    windows: Sequence[Tensor],
    recipe: Recipe,
    progress: Callable[[int, int], None] = lambda *_: None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Activations:
    """windows: token ids [tokens] each. `progress(done, total)` is called after each layer.

    Raises InputError and UnsupportedModelError as loading does, PrecisionError for activations that are not finite.
    """
    entries: dict[str, ActivationEntry] = {}
    tokens = sum(len(window) for window in windows)
    with torch.inference_mode(), freed_at_once():
        model = LayeredModel(folder, dtype, device)
        states = model.embedding().run(windows)
        for index in range(model.num_layers):
            found, states = _one_layer(model.layer(index), states, recipe, every=max(1, tokens // SAMPLED_TOKENS))
            entries |= found
            progress(index + 1, model.num_layers)
    notes = {"method": recipe.method, "smoothing": str(recipe.smoothing), "tokens": str(tokens)}
    return Activations(model_digest(folder), entries, notes)


def _one_layer(
    layer: Piece, states: list[Tensor], recipe: Recipe, *, every: int
) -> tuple[dict[str, ActivationEntry], list[Tensor]]:
    """Entries of the layer's linears, and its outputs."""
    linears = layer.keyed_linears
    samples = {key: InputSample(linear.in_features, every, linear.weight.device) for key, linear in linears.items()}
    outputs = _observed(layer, states, linears, lambda key, inputs: samples[key].add(inputs))
    factors = {key: recipe.factors(samples[key], linear.weight.data) for key, linear in linears.items()}
    histograms = {key: MagnitudeHistogram() for key in linears}
    _observed(layer, states, linears, lambda key, inputs: histograms[key].add(inputs.float() / factors[key]))
    threshold = THRESHOLDS[recipe.method]
    return {key: ActivationEntry(scale_of(threshold(histograms[key])), factors[key].cpu()) for key in linears}, outputs


def _observed(
    layer: Piece, states: Sequence[Tensor], linears: Mapping[str, nn.Linear], observe: Observe
) -> list[Tensor]:
    """The layer's outputs; `observe(linear, inputs [tokens, K])` sees every window's inputs, without the rows that pad a batch."""
    outputs = []
    for window in states:
        with inputs_heard(linears, partial(_observe_rows, observe, len(window))):
            outputs += layer.run([window])
    return outputs


def _observe_rows(observe: Observe, tokens: int, key: str, inputs: Tensor) -> None:
    observe(key, inputs.flatten(0, -2)[:tokens])


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written; 2: the input is wrong, said on stderr."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        folder = resolve_model(options.model)
        output: Path = options.output or folder / ACTIVATIONS_FILE
        _check_writable(output)
        _run(folder, options).write(output)
    except (InputError, UnsupportedModelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{output}\n")
    return 0


def _check_writable(output: Path) -> None:
    """Before minutes of work."""
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"{output.parent} cannot be written: name another place with --output")


def _run(folder: Path, options: argparse.Namespace) -> Activations:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu, or a CUDA build of torch")
    limit = getattr(read_config(folder), "max_position_embeddings", None) or options.window
    windows = read_windows(folder, options.text, min(options.window, limit), options.tokens, 0).calibration
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("calibrating activations", total=None)
        return calibrate_activations(
            folder,
            windows,
            Recipe(options.method, options.smoothing),
            lambda done, total: bar.update(task, completed=done, total=total),
            dtype=COMPUTE_DTYPES[options.compute_type],
            device=torch.device(options.device),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strata_runtime.tools.calibration.activation_calibration",
        description=__doc__.split("\n", maxsplit=1)[0],
    )
    parser.add_argument("model", help="folder or uri of the model")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text like those that the model will see")
    parser.add_argument("--method", choices=get_args(CalibrationMethod), default="minmax")
    parser.add_argument("--smoothing", type=_smoothing, default="search", help="search, none, or alpha from 0 to 1")
    parser.add_argument("--output", type=Path, help=f"without it, {ACTIVATIONS_FILE} in the model's folder")
    parser.add_argument("--tokens", type=positive, default=8192, help="tokens that are seen")
    parser.add_argument("--window", type=positive, default=512, help="tokens that are seen together")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute-type", choices=get_args(ComputeType), default="float32")
    return parser


def _smoothing(text: str) -> float | str | None:
    if text in {"search", "none"}:
        return None if text == "none" else text
    try:
        alpha = float(text)
    except ValueError:
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: search, none, or a number from 0 to 1")
    return alpha


if __name__ == "__main__":
    sys.exit(main())
