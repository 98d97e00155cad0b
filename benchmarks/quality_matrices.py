"""Errors of quantizers on random matrices with the tails and shapes of large models, for `benchmarks.quality`.

Any precision is set beside the authors' figures, and beside the uniform nested form at equal stored bits.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.reference import nested_uniform
from benchmarks.rows import Row
from strata_planner.contract.formats import ANY_PRECISION, stored_bytes
from strata_runtime.formats.any_precision import AnyParent, quantize_any

# The authors' code on a heavy-tailed matrix of 512 x 4096: relative weighted squared error by width, and seconds for it on two cores.
AUTHORS = "the authors' code, published"
AUTHORS_ERROR = {3: 5.7e-2, 4: 1.6e-2, 5: 3.8e-3, 6: 9.0e-4, 7: 2.0e-4, 8: 4.3e-5}
AUTHORS_SECONDS = 0.34
AUTHORS_SHAPE = (512, 4096)
MOST_ERROR = 1.05
REPEATS = 20
THREADS = 2
ROWS = 16  # of the matrices of large models: an error is a mean over weights, of which each row has thousands
COLUMNS = (2048, 4096, 14336)  # inputs of linears of models of 1B and 8B parameters
EMPHASES = (2.0, 4.0)  # of the uniform form: for few bits, and for all alike


@dataclass(frozen=True)
class Matrix:
    """weight: float32 [N, K]; importance: [N, K], like a Fisher diagonal."""

    weight: Tensor
    importance: Tensor

    def error(self, values: Tensor) -> float:
        """Relative, squared, weighted by importance."""
        missed = (self.importance * (values - self.weight).square()).sum(dtype=torch.float64)
        return float(missed / (self.importance * self.weight.square()).sum(dtype=torch.float64))


def student(out_features: int, in_features: int, seed: int = 0) -> Matrix:
    """Weights: 0.02 times Student's t of 5 degrees of freedom; importances: squared normals, as one squared gradient is."""
    draws = torch.randn(7, out_features, in_features, generator=torch.Generator().manual_seed(seed))
    return Matrix(0.02 * draws[0] / draws[1:6].square().mean(dim=0).sqrt(), draws[6].square())


def normal(out_features: int, in_features: int, seed: int = 0) -> Matrix:
    """Weights without heavy tails, the same importances."""
    draws = torch.randn(2, out_features, in_features, generator=torch.Generator().manual_seed(seed))
    return Matrix(0.02 * draws[0], draws[1].square())


def columns(out_features: int, in_features: int, seed: int = 0) -> Matrix:
    """Student's t whose columns differ in scale (log-normal, 0.5) and in importance (log-normal, 1.5), as activations differ by channel."""
    drawn = student(out_features, in_features, seed)
    draws = torch.randn(2, in_features, generator=torch.Generator().manual_seed(seed + 1))
    return Matrix(drawn.weight * (0.5 * draws[0]).exp(), drawn.importance * (1.5 * draws[1]).exp())


KINDS: Mapping[str, Callable[[int, int], Matrix]] = {
    "t, 5 degrees": student,
    "normal": normal,
    "t, columns unlike": columns,
}


def upscaling_rows() -> list[Row]:
    """Errors and seconds of one parent of 8 bits, beside the authors' figures."""
    matrix = student(*AUTHORS_SHAPE)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    parent, seconds = _timed(matrix)
    torch.set_num_threads(threads)
    rows = []
    for bits, theirs in AUTHORS_ERROR.items():
        ours = matrix.error(parent.dequantized(bits))
        rows.append(
            Row(
                f"upscaling_error_k{bits}",
                ours,
                "weighted squared error, relative",
                AUTHORS,
                theirs,
                ours / theirs,
                MOST_ERROR,
                lower_is_better=True,
            )
        )
    per_weight, theirs = seconds / matrix.weight.numel(), AUTHORS_SECONDS / matrix.weight.numel()
    ratio = per_weight / theirs
    unit = f"s, {THREADS} threads, best of {REPEATS}"
    return [
        *rows,
        Row("quantize_seconds_per_parameter", per_weight, unit, AUTHORS, theirs, ratio, 1.0, lower_is_better=True),
    ]


def _timed(matrix: Matrix) -> tuple[AnyParent, float]:
    """The parent, and the least seconds of several makings."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        parent = quantize_any(matrix.weight, importance=matrix.importance)
        seconds.append(time.perf_counter() - started)
    return parent, min(seconds)


Points = dict[int, tuple[float, float]]  # by width: stored bits per weight, and error


def at_equal_bits(points: Points, stored: float) -> float:
    """The error of any precision at so many stored bits: between widths it falls geometrically, beyond them as between the nearest two."""
    found = sorted(points.values())
    first = next((place for place in range(len(found) - 2) if stored <= found[place + 1][0]), len(found) - 2)
    (low, coarse), (high, fine) = found[first], found[first + 1]
    share = (stored - low) / (high - low)
    return math.exp((1 - share) * math.log(coarse) + share * math.log(fine))


def any_points(matrix: Matrix) -> Points:
    parent = quantize_any(matrix.weight, importance=matrix.importance)
    (out_features, in_features), count = matrix.weight.shape, matrix.weight.numel() / 8
    return {
        bits: (
            stored_bytes(name, out_features, in_features, "bfloat16") / count,
            matrix.error(parent.dequantized(bits)),
        )
        for bits, name in ANY_PRECISION.items()
    }


def uniform_points(matrix: Matrix, emphasis: float) -> Points:
    uniform = nested_uniform.quantize(matrix.weight, importance=matrix.importance, emphasis=emphasis)
    count = matrix.weight.numel() / 8
    return {bits: (uniform.stored_bytes(bits) / count, matrix.error(uniform.at(bits))) for bits in ANY_PRECISION}


def nested_forms() -> tuple[Table, list[Row]]:
    """The table of both forms over shapes and kinds; rows for Student's t of the authors' width."""
    table = Table(
        title="nested forms: stored bits per weight and weighted error; ratios of any precision over uniform at equal stored bits"
    )
    headings = ("weights", "K", "bits", "any: stored", "error", "uniform: stored")
    for column in (*headings, *(f"{name}, emphasis {each:g}" for each in EMPHASES for name in ("error", "ratio"))):
        table.add_column(column, justify="left" if column == "weights" else "right")
    rows = []
    for kind, made in KINDS.items():
        for width in COLUMNS:
            matrix = made(ROWS, width)
            ours, theirs = any_points(matrix), [uniform_points(matrix, each) for each in EMPHASES]
            for bits in ANY_PRECISION:
                stored = theirs[0][bits][0]
                equal = at_equal_bits(ours, stored)
                cells = [*ours[bits], stored, *(x for each in theirs for x in (each[bits][1], equal / each[bits][1]))]
                table.add_row(kind, str(width), str(bits), *(f"{cell:.3g}" for cell in cells))
                if made is student and width == AUTHORS_SHAPE[1]:
                    best = min(each[bits][1] for each in theirs)
                    unit = f"error, K = {width}, at {stored:.3g} stored bits"
                    rows.append(
                        Row(
                            f"any_over_uniform_k{bits}",
                            equal,
                            unit,
                            "uniform nested form, its better emphasis",
                            best,
                            equal / best,
                        )
                    )
    return table, rows
