"""What fitting tables to the inputs gains and costs on shapes of large models, for `benchmarks.quality`: errors of products on inputs that no fit saw.

Inputs are random, of three kinds: independent ones (nothing to gain), and two that go together as hidden states do: few directions of even or of falling strength,
a mean of their own, channels of unlike scales. Codes are found with the inputs' mean squares as importance, so that what is gained is gained over them.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.quality_matrices import AUTHORS_SHAPE, COLUMNS, ROWS, THREADS, student
from benchmarks.rows import Row
from strata_planner.contract.formats import ANY_PRECISION
from strata_runtime.formats.any_precision import AnyParent, quantize_any, refit
from strata_runtime.formats.any_precision.refit import WIDTHS

SEEN_TOKENS, UNSEEN_TOKENS = 2048, 1024
DIRECTIONS = 512
TIMED_ROWS = 256
REPEATS = 5


@dataclass(frozen=True)
class Inputs:
    """`falling`: a direction's strength by its number, from 1, to the power of minus this; none: inputs are independent."""

    falling: float | None

    def drawn(self, tokens: int, columns: int) -> Tensor:
        """float32 [tokens, K]."""
        draws = torch.Generator().manual_seed(0)
        scales = (0.5 * torch.randn(columns, generator=draws)).exp()
        if self.falling is None:
            return torch.randn(tokens, columns, generator=draws) * scales
        strengths = torch.pow(torch.arange(1.0, DIRECTIONS + 1), -self.falling)
        strengths = strengths / strengths.square().mean().sqrt()
        directions = torch.randn(DIRECTIONS, columns, generator=draws) / math.sqrt(DIRECTIONS)
        mean = 0.3 * torch.randn(columns, generator=draws)
        found = (torch.randn(tokens, DIRECTIONS, generator=draws) * strengths) @ directions + mean
        return found.add(torch.randn(tokens, columns, generator=draws), alpha=0.3) * scales


KINDS: Mapping[str, Inputs] = {
    "independent": Inputs(None),
    "even": Inputs(0.0),
    "falling": Inputs(0.5),
}


def refit_rows() -> tuple[Table, list[Row]]:
    """Errors after over before the fit, at every width (the command fits the first three); and seconds for all of a weight."""
    table = Table(
        title="tables fitted to the inputs: error of products on unseen inputs, over that before", title_justify="left"
    )
    for column in ("inputs", "K", *map(str, ANY_PRECISION)):
        table.add_column(column, justify="left" if column == "inputs" else "right")
    rows = []
    for columns in COLUMNS:
        weight = student(ROWS, columns).weight
        for kind, inputs in KINDS.items():
            tokens = inputs.drawn(SEEN_TOKENS + UNSEEN_TOKENS, columns)
            seen, unseen = tokens[:SEEN_TOKENS], tokens[SEEN_TOKENS:]
            hessian = seen.t() @ seen
            parent = quantize_any(weight, importance=hessian.diagonal())
            pair = (refit(parent, weight, hessian, widths=tuple(ANY_PRECISION)), parent)
            errors = {bits: tuple(_error(each, bits, weight, unseen) for each in pair) for bits in ANY_PRECISION}
            table.add_row(kind, str(columns), *(f"{after / before:.3f}" for after, before in errors.values()))
            if columns == AUTHORS_SHAPE[1]:
                unit = f"relative, K = {columns}, {SEEN_TOKENS} tokens seen"
                of_width = {bits: errors[bits] for bits in WIDTHS}
                rows += [
                    Row(f"refit_error_{kind}_k{bits}", after, unit, "not fitted", before, after / before)
                    for bits, (after, before) in of_width.items()
                ]
        rows.append(_cost(columns, hessian))
    return table, rows


def _error(parent: AnyParent, bits: int, weight: Tensor, tokens: Tensor) -> float:
    """Relative squared error of the products."""
    missed = (tokens @ (parent.dequantized(bits) - weight).t()).square().sum(dtype=torch.float64)
    return float(missed / (tokens @ weight.t()).square().sum(dtype=torch.float64))


def _cost(columns: int, hessian: Tensor) -> Row:
    """Seconds per weight beside those of the quantization before it."""
    weight = student(TIMED_ROWS, columns).weight
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    seconds: dict[str, list[float]] = {"quantize": [], "refit": []}
    for _ in range(REPEATS):
        started = time.perf_counter()
        parent = quantize_any(weight, importance=hessian.diagonal())
        between = time.perf_counter()
        refit(parent, weight, hessian)
        seconds["quantize"].append(between - started)
        seconds["refit"].append(time.perf_counter() - between)
    torch.set_num_threads(threads)
    ours, before = (min(seconds[name]) / weight.numel() for name in ("refit", "quantize"))
    unit = f"s, K = {columns}, {THREADS} threads, best of {REPEATS}"
    return Row(f"refit_seconds_per_parameter_{columns}", ours, unit, "quantizing before it", before, ours / before)
