"""Which indicator ranks the linears of a model as the loss does, and what it costs: LLM-PQ's variance indicator, our layer
deviation, the Hessian, the share of parameters, chance. Then how well the indicators predict the loss of mixed precisions.

`python -m benchmarks.sensitivity [--json FILE] [--tokens 512] [--measured-tokens 12288]`; some ten minutes on one thread.
Every linear of `examples/models/strata-tiny` is quantized alone at 3 and 4 bits (the runtime's int3 and int4) and the
increase of the loss is measured on windows of `heldout.txt` that no indicator has seen. Spearman's rank correlation; 95 %
intervals from a bootstrap over windows (the loss's own noise, which drawing windows doubles, so that intervals lean
towards 0) and linears at once. Costs are processor seconds
of one thread on the same tokens, loading left out.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hessian import Curvature, Hessian, LinearKey
from benchmarks.rows import Row, run
from strata_planner.contract.calibration import Calibration, LayerStatistics, LinearStatistics
from strata_planner.sensitivity import Sensitivity
from strata_planner.sensitivity.fit import leave_one_out
from strata_planner.sensitivity.indicators import IndicatorName, variance
from strata_runtime.tools.calibration.calibrate import Subject, calibrate
from strata_runtime.tools.calibration.layers import LayeredModel, Piece
from strata_runtime.tools.calibration.losses import window_loss
from strata_runtime.tools.calibration.statistics import deviations, input_moments, layer_statistics
from strata_runtime.tools.calibration.text import Windows, read_windows

MODEL = Path("examples/models/strata-tiny")
WINDOW = 512
BITS = (3, 4)
TOLERANCE, MOST_PRODUCTS = 1e-2, 20  # of the power iteration, per linear
PROBES = 30  # of the trace
DRAWS = 1000  # of the bootstrap
DEVIATION, DETERMINISTIC, STOCHASTIC = "deviation (ours)", "variance, deterministic", "variance, stochastic"
HESSIAN, TRACE = "Hessian, top eigenvalue", "Hessian, trace"
Array = npt.NDArray[np.float64]
Scores = dict[int, dict[LinearKey, float]]  # bits -> linear -> score


@dataclass(frozen=True)
class Method:
    """One indicator of every linear, and what it took."""

    scores: Scores
    seconds: float


@dataclass(frozen=True)
class Increases:
    """Measured: bits -> linear -> nats more than at 16 bits, summed per window; `tokens` predicted in each window."""

    sums: dict[int, dict[LinearKey, Array]]
    tokens: Array


class Stopwatch:
    """Processor seconds of this process."""

    def __enter__(self) -> Self:
        self._started = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self._started


def our_indicators(layers: Sequence[Piece], states: list[torch.Tensor]) -> dict[str, Method]:
    """From the embedded calibration windows: the variance indicator's pass, and beyond it that of the deviation."""
    moments_watch, deviation_watch = 0.0, 0.0
    found: list[LayerStatistics] = []
    for layer in layers:
        with Stopwatch() as watch:
            with input_moments(layer.linears, WINDOW) as moments:
                outputs = layer.run(states)
            layer_statistics(layer.linears, moments, {})
        moments_watch += watch.seconds
        with Stopwatch() as watch:
            moved = {bits: deviations(layer, layer.quantized(bits), states, outputs) for bits in BITS}
        deviation_watch += watch.seconds
        found.append(layer_statistics(layer.linears, moments, moved))
        states = outputs
    return {
        DEVIATION: Method(
            _scores(found, lambda each, bits: each.deviation[str(bits)]), moments_watch + deviation_watch
        ),
        DETERMINISTIC: Method(_scores(found, lambda each, bits: variance(each, bits, "deterministic")), moments_watch),
        STOCHASTIC: Method(_scores(found, lambda each, bits: variance(each, bits, "stochastic")), moments_watch),
        "variance, one step a matrix": Method(
            _scores(found, lambda each, bits: variance(each, bits, "deterministic", "asymmetric")), moments_watch
        ),
        "share of parameters": Method(_scores(found, lambda each, _: float(each.out_features * each.in_features)), 0.0),
        "random": Method(_chance(found), 0.0),
    }


def _scores(layers: Sequence[LayerStatistics], score: Callable[[LinearStatistics, int], float]) -> Scores:
    return {
        bits: {(index, each.name): score(each, bits) for index, layer in enumerate(layers) for each in layer.linears}
        for bits in BITS
    }


def _chance(layers: Sequence[LayerStatistics]) -> Scores:
    draw = random.Random(0)
    return _scores(layers, lambda *_: draw.random())


def hessian_indicators(layers: Sequence[Piece], windows: Sequence[torch.Tensor]) -> dict[str, Method]:
    """Curvature x |W - Q(W)|^2, the quantizing counted to both."""
    with Stopwatch() as watch:
        errors = {bits: _squared_errors(layers, bits) for bits in BITS}
    hessian = Hessian(MODEL, windows)

    def method(curvature: Curvature) -> Method:
        scores = {
            bits: {key: curvature.values[key] * error for key, error in each.items()} for bits, each in errors.items()
        }
        return Method(scores, curvature.seconds + watch.seconds)

    trace = hessian.mean_eigenvalues(PROBES)
    return {HESSIAN: method(hessian.top_eigenvalues(TOLERANCE, MOST_PRODUCTS)), TRACE: method(trace)}


def _squared_errors(layers: Sequence[Piece], bits: int) -> dict[LinearKey, float]:
    return {
        (index, name): float((weight - layer.linears[name].weight).square().sum())
        for index, layer in enumerate(layers)
        for name, weight in layer.quantized(bits).items()
    }


def measured_increases(
    layers: Sequence[Piece], head: Piece, windows: Sequence[torch.Tensor], states: list[torch.Tensor]
) -> Increases:
    """Each linear alone at each precision. states: the embedded windows."""

    def losses(states: list[torch.Tensor], first: int) -> Array:
        for layer in layers[first:]:
            states = layer.run(states)
        return np.array([window_loss(head, *pair) for pair in zip(states, windows, strict=True)])

    dense = losses(states, 0)
    sums: dict[int, dict[LinearKey, Array]] = {bits: {} for bits in BITS}
    for index, layer in enumerate(layers):
        for bits in BITS:
            for name, weight in layer.quantized(bits).items():
                with layer.with_weights({name: weight}):
                    sums[bits][index, name] = losses(states, index) - dense
        states = layer.run(states)
        sys.stderr.write(f"measured layer {index + 1} of {len(layers)}\n")
    return Increases(sums, np.array([float(len(window) - 1) for window in windows]))


def spearman(first: Array, second: Array) -> float:
    """Rank correlation; ties share their mean rank; 0 where one side is constant."""
    a, b = _ranks(first), _ranks(second)
    spread = a.std() * b.std()
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread else 0.0


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=np.float64)


class Correlations:
    """Of all methods with the measured increases, on the same draws of windows and linears."""

    def __init__(self, methods: Mapping[str, Method], measured: Increases) -> None:
        self._keys = list(measured.sums[BITS[0]])
        self._scores = {
            name: {bits: np.array([method.scores[bits][key] for key in self._keys]) for bits in BITS}
            for name, method in methods.items()
        }
        self._sums = {bits: np.stack([measured.sums[bits][key] for key in self._keys]) for bits in BITS}
        self._tokens = measured.tokens
        generator = np.random.default_rng(0)
        windows = len(measured.tokens)
        self._draws = [
            (generator.integers(0, windows, windows), generator.integers(0, len(self._keys), len(self._keys)))
            for _ in range(DRAWS)
        ]

    def of(self, name: str, bits: int) -> float:
        return spearman(self._scores[name][bits], self._increase(bits))

    def by_layer(self, name: str, bits: int) -> float:
        """Of sums over the linears of each layer."""
        layers = sorted({index for index, _ in self._keys})
        members = [[place for place, key in enumerate(self._keys) if key[0] == index] for index in layers]

        def sums(values: Array) -> Array:
            return np.array([values[each].sum() for each in members])

        return spearman(sums(self._scores[name][bits]), sums(self._increase(bits)))

    def mean(self, name: str) -> float:
        return sum(self.of(name, bits) for bits in BITS) / len(BITS)

    def interval(self, name: str, bits: int) -> tuple[float, float]:
        return _middle([self._drawn(name, bits, draw) for draw in self._draws])

    def difference(self, name: str, peer: str) -> tuple[float, float]:
        """The interval of the mean correlation over that of the peer, as a difference: a ratio has no bounds near zero."""
        drawn = [
            sum(self._drawn(name, bits, draw) - self._drawn(peer, bits, draw) for bits in BITS) / len(BITS)
            for draw in self._draws
        ]
        return _middle(drawn)

    def reliability(self, bits: int) -> float:
        """Between the increases on even and on odd windows: no indicator can be expected to do much better."""
        even, odd = np.arange(0, len(self._tokens), 2), np.arange(1, len(self._tokens), 2)
        return spearman(self._increase(bits, even), self._increase(bits, odd))

    def _increase(self, bits: int, windows: npt.NDArray[np.int64] | None = None) -> Array:
        chosen = np.arange(len(self._tokens)) if windows is None else windows
        return np.asarray(self._sums[bits][:, chosen].sum(axis=1) / self._tokens[chosen].sum())

    def _drawn(self, name: str, bits: int, draw: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]) -> float:
        windows, linears = draw
        return spearman(self._scores[name][bits][linears], self._increase(bits, windows)[linears])


def _middle(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def correlation_table(methods: Mapping[str, Method], found: Correlations) -> Table:
    table = Table(title="rank correlation with the measured loss increase (95 % interval)", title_justify="left")
    for column in ("indicator", "3 bits, linears", "4 bits, linears", "3 bits, layers", "4 bits, layers", "seconds"):
        table.add_column(column, justify="left" if column == "indicator" else "right")
    for name, method in methods.items():
        cells = [f"{found.of(name, bits):.2f} ({_span(found.interval(name, bits))})" for bits in BITS]
        cells += [f"{found.by_layer(name, bits):.2f}" for bits in BITS]
        table.add_row(name, *cells, f"{method.seconds:.2f}")
    table.add_row("even against odd windows", *(f"{found.reliability(bits):.2f}" for bits in BITS), "", "", "")
    return table


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def fit_table(calibration: Calibration) -> Table:
    """How well each indicator and curve predicts the loss of mixed precisions, each from the others."""
    table = Table(title="leave-one-out error of predicted loss increases, mean |log ratio|", title_justify="left")
    for column in ("indicator", "proportional", "power", "isotonic"):
        table.add_column(column, justify="left" if column == "indicator" else "right")
    names: tuple[IndicatorName, ...] = ("deviation", "deterministic", "stochastic")
    for name in names:
        sensitivity = Sensitivity.from_statistics(calibration, name)
        points = [(sensitivity.total(each.bits), each.increase, each.error) for each in calibration.measured]
        telling = [each for each in points if each[1] > 2 * each[2]]
        errors = [
            leave_one_out(calibration.loss or 0.0, curve, telling) for curve in ("proportional", "power", "isotonic")
        ]
        table.add_row(name, *(f"{error:.3f}" for error in errors))
    return table


TOKENS, MEASURED_TOKENS = 512, 12_288  # of the indicators; of the losses


def measure(tokens: int, measured_tokens: int) -> list[Row]:
    torch.set_num_threads(1)
    windows = read_windows(MODEL, MODEL / "heldout.txt", WINDOW, tokens, measured_tokens)
    with torch.inference_mode():
        model = LayeredModel(MODEL, torch.float32, torch.device("cpu"))
        embedding, head = model.embedding(), model.head()
        layers = [model.layer(index) for index in range(model.num_layers)]
        layers[0].run(embedding.run(windows.calibration[:1]))  # torch sets up what it needs
        methods = our_indicators(layers, embedding.run(windows.calibration))
        measured = measured_increases(layers, head, windows.held_back, embedding.run(windows.held_back))
    methods |= hessian_indicators(layers, windows.calibration)
    found = Correlations(methods, measured)
    console = Console(width=150)
    console.print(correlation_table(methods, found))
    console.print(fit_table(_calibration(windows)))
    return [*_correlation_rows(found), *_time_rows(methods)]


def _calibration(windows: Windows) -> Calibration:
    return calibrate(Subject(MODEL, "heldout.txt"), windows, lambda *_: None)


_LEAST_CORRELATION = 0.01  # a peer that ranks by chance must not make a ratio
# Name of the rows' end -> the indicator, its peer, and the goals of correlation and time.
_COMPARED = {
    "": (DEVIATION, HESSIAN, 1.0, 0.02),
    "_variance": (DETERMINISTIC, HESSIAN, None, None),
    "_trace": (DEVIATION, TRACE, None, None),
}


def _correlation_rows(found: Correlations) -> list[Row]:
    rows = []
    for end, (name, peer, goal, _) in _COMPARED.items():
        low, high = found.difference(name, peer)
        unit = f"Spearman, mean of 3 and 4 bits; {name}, difference {low:+.2f} to {high:+.2f}"
        own, other = found.mean(name), found.mean(peer)
        ratio = own / max(other, _LEAST_CORRELATION)
        rows.append(Row(f"indicator_correlation_ratio{end}", own, unit, peer, other, ratio, goal))
    return rows


def _time_rows(methods: Mapping[str, Method]) -> list[Row]:
    rows = []
    for end, (name, peer, _, goal) in _COMPARED.items():
        own, other = methods[name].seconds, methods[peer].seconds
        rows.append(
            Row(f"indicator_time_ratio{end}", own, f"s, {name}", peer, other, own / other, goal, lower_is_better=True)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--measured-tokens", type=int, default=MEASURED_TOKENS)
    chosen, rest = parser.parse_known_args()
    run("sensitivity", lambda: measure(chosen.tokens, chosen.measured_tokens), rest)


if __name__ == "__main__":
    main()
