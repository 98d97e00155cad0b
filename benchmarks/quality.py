"""What precision costs: perplexity of our model in every format and at every width of the nested ones, beside separate models of each width.

`python -m benchmarks.quality [--tokens N] [--json FILE]`: some ten minutes on one quiet core, most of them evaluations of the model. Half of the windows of
its held-out text calibrate (Fisher diagonals, Hessians, sensitivities), the other half is what perplexity is measured on. Width 256 makes
tables of centroids weigh more than the weights: claims at equal stored bits are those on matrices of large shapes (`quality_matrices`).
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.quality_matrices import nested_forms, upscaling_rows
from benchmarks.quality_methods import (
    FITTED,
    GPTQ_NAME,
    WIDTHS,
    Calibrated,
    Method,
    calibrated,
    calibrated_activations,
    in_format,
    methods,
)
from benchmarks.quality_model import Losses, Measured, Replacement
from benchmarks.quality_refit import refit_rows
from benchmarks.rows import Row, run
from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName, stored_bytes
from strata_planner.sensitivity import Sensitivity
from strata_runtime.formats import MAKERS
from strata_runtime.tools.calibration.calibrate import Subject, calibrate
from strata_runtime.tools.calibration.text import Windows, read_windows

MODEL = Path("examples/models/strata-tiny")
TEXT = "heldout.txt"
STATIC: FormatName = "w8a8_static"
WINDOW = 512
CALIBRATION_TOKENS, MEASURED_TOKENS = 8192, 12_288
MOST_RATIO = 1.01
LOW, HIGH = 3, 4  # bits of the mixed plans: half of the layers each
DRAWS = 6


def measure(tokens: int) -> list[Row]:
    torch.set_num_threads(1)
    console = Console(width=150)
    rows = upscaling_rows()
    for made in (nested_forms, refit_rows):
        table, compared = made()
        console.print(table)
        rows += compared
    windows = read_windows(MODEL, MODEL / TEXT, WINDOW, min(tokens, CALIBRATION_TOKENS), tokens)
    model = Measured(MODEL, windows.held_back)
    dense = model.losses({})
    console.print(
        f"{MODEL.name}: {len(windows.held_back)} windows of {WINDOW} tokens, perplexity {dense.perplexity:.3f}"
    )
    rows += _format_rows(model, dense, windows, console)
    found = calibrated(MODEL, windows.calibration)
    return [*rows, *_width_rows(model, found, console), *_mixed_rows(model, found, windows, console)]


def _format_rows(model: Measured, dense: Losses, windows: Windows, console: Console) -> list[Row]:
    """Every format that a weight alone can be stored in, and the one that takes calibrated activations beside."""
    table = Table(title="formats: perplexity and stored bits per weight", title_justify="left")
    for column in ("format", "bits", "stored bits", "perplexity", "over 16 bits", "standard error"):
        table.add_column(column, justify="left" if column == "format" else "right")
    rows = []
    for name in (*MAKERS, STATIC):
        made: Mapping[str, Replacement] = (
            calibrated_activations(MODEL, windows.calibration, model.weights)
            if name == STATIC
            else {path: in_format(weight, name) for path, weight in model.weights.items()}
        )
        losses = model.losses(made)
        ratio, error = losses.over(dense)
        stored = _stored_bits(model, lambda n, k, name=name: stored_bytes(name, n, k, "bfloat16"))  # type: ignore[misc]
        cells = (f"{stored:.2f}", f"{losses.perplexity:.3f}", f"{ratio:.4f}", f"{error:.4f}")
        table.add_row(name, str(BITS_OF_FORMAT[name]), *cells)
        unit = f"per token, {stored:.2f} stored bits"
        rows.append(Row(f"perplexity_{name}", losses.perplexity, unit, "16 bits", dense.perplexity, ratio))
    console.print(table)
    return rows


def _width_rows(model: Measured, found: Calibrated, console: Console) -> list[Row]:
    """Every method at every width that it has; the nested models over separate ones that were treated alike: as `strata quantize --text` makes them, and less."""
    measured: dict[tuple[str, int], Losses] = {}
    listed = methods(found)
    for method in listed:
        made = {bits: method.make(model.weights, bits) for bits in method.widths}
        measured |= {(method.name, bits): model.losses(weights) for bits, weights in made.items()}
    console.print(
        _by_width("perplexity by width", listed, lambda method, bits: f"{measured[method.name, bits].perplexity:.3f}")
    )
    console.print(
        _by_width(
            f"stored bits per weight of {MODEL.name}",
            listed,
            lambda method, bits: f"{_stored_bits(model, partial(method.stored, bits)):.2f}",
        )
    )
    peers = [
        (f"nested_over_separate{{}}{end}", f"any precision, {kind}", f"separate k-means, {kind}", not end)
        for end, kind in (("", FITTED), ("_fisher", "Fisher"), ("_plain", "unweighted"))
    ]
    peers.append(("nested_over_gptq{}", f"any precision, {FITTED}", GPTQ_NAME, False))
    return [
        _over(name.format(f"_k{bits}"), (ours, theirs), bits, measured, listed=listed and bits <= HIGH)
        for name, ours, theirs, listed in peers
        for bits in WIDTHS
        if {(ours, bits), (theirs, bits)} <= measured.keys()
    ]


def _over(
    name: str, methods_: tuple[str, str], bits: int, measured: Mapping[tuple[str, int], Losses], *, listed: bool
) -> Row:
    """One method over another, the same width and the same windows."""
    ours, theirs = (measured[each, bits] for each in methods_)
    ratio, error = ours.over(theirs)
    unit = f"per token, {methods_[0]}; ratio's standard error {error:.4f}"
    goal = MOST_RATIO if listed else None
    return Row(name, ours.perplexity, unit, methods_[1], theirs.perplexity, ratio, goal, lower_is_better=True)


def _by_width(title: str, listed: Sequence[Method], cell: Callable[[Method, int], str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for bits in WIDTHS:
        table.add_column(str(bits), justify="right")
    for method in listed:
        table.add_row(method.name, *(cell(method, bits) if bits in method.widths else "" for bits in WIDTHS))
    return table


def _stored_bits(model: Measured, stored: Callable[[int, int], int]) -> float:
    shapes = [(weight.shape[0], weight.shape[1]) for weight in model.weights.values()]
    return sum(stored(*shape) for shape in shapes) * 8 / sum(n * k for n, k in shapes)


@dataclass(frozen=True)
class Mixed:
    """Any-precision weights of the model at both widths, by linear; layers take one of them."""

    model: Measured
    weights: Mapping[int, Mapping[str, Tensor]]

    def losses(self, high: Sequence[int]) -> Losses:
        """The layers of `high` at more bits, the others at fewer."""
        chosen = set(high)
        layer_of = self.model.layer_of
        return self.model.losses(
            {path: self.weights[HIGH if layer in chosen else LOW][path] for path, layer in layer_of.items()}
        )


def _mixed_rows(model: Measured, found: Calibrated, windows: Windows, console: Console) -> list[Row]:
    """Half of the layers at more bits: those that sensitivity names, the other ones, and random halves."""
    mixed = Mixed(model, {bits: found.nested(model.weights, bits) for bits in (LOW, HIGH)})
    half, layers = model.num_layers // 2, range(model.num_layers)
    ranks = {
        "": sorted(layers, key=_deviation(windows)),
        "_fisher": sorted(layers, key=_predicted(found, mixed)),
    }
    draw = random.Random(0)
    drawn = [mixed.losses(draw.sample(layers, half)).perplexity for _ in range(DRAWS)]
    console.print(f"random halves of the layers at {HIGH} bits: {fmean(drawn):.3f} +- {stdev(drawn):.3f}")
    rows = []
    peer = f"random halves, mean of {DRAWS}"
    for end, rank in ranks.items():
        for name, chosen, goal in (("ordered", rank[half:], 1.0), ("reversed", rank[:half], None)):
            value = mixed.losses(chosen).perplexity
            console.print(f"{name}{end}: layers {sorted(chosen)} at {HIGH} bits, the others at {LOW}: {value:.3f}")
            rows.append(
                Row(
                    f"sensitivity_{name}{end}",
                    value,
                    f"per token, {(LOW + HIGH) / 2} bits on average",
                    peer,
                    fmean(drawn),
                    value / fmean(drawn),
                    goal,
                    lower_is_better=True,
                )
            )
    return rows


def _deviation(windows: Windows) -> Callable[[int], float]:
    """What the planner would gain by a layer's further bit, by its indicator of choice."""
    statistics = calibrate(Subject(MODEL, TEXT), Windows(windows.calibration, ()), lambda *_: None)
    table = Sensitivity.from_statistics(statistics)
    return lambda layer: table.of(layer, LOW) - table.of(layer, HIGH)


def _predicted(found: Calibrated, mixed: Mixed) -> Callable[[int], float]:
    """The same by the Fisher-weighted errors of the very weights: the second-order increase of the loss."""
    gains = dict.fromkeys(range(mixed.model.num_layers), 0.0)
    for path, weight in mixed.model.weights.items():
        errors = [
            float((found.fisher[path] * (mixed.weights[bits][path] - weight).square()).sum()) for bits in (LOW, HIGH)
        ]
        gains[mixed.model.layer_of[path]] += errors[0] - errors[1]
    return gains.__getitem__


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tokens", type=int, default=MEASURED_TOKENS, help="of the held-back half, at most")
    chosen, rest = parser.parse_known_args()
    run("quality", lambda: measure(chosen.tokens), rest)


if __name__ == "__main__":
    main()
