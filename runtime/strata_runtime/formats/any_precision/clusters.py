"""Clusters of sorted rows, in plain torch: what the native quantizer is tested against, and what runs without it.

Called by `quantize`. Every row is a problem of its own; all rows advance together. A cluster is a run of the sorted row, so a clustering is its
borders [R, S + 1], rising, the first 0 and the last K; a border never parts equal values. With prefix sums of w and w x the weighted mean of a
run, and what it takes off the weighted squared error, cost one subtraction each.

The arithmetic is float64 and its order is part of the definition (sums from left to right, the first of equals wins): the native code gives the same codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_CANDIDATES = 128  # borders that the seed chooses from before it is refined; twice the clusters, if that is more
MOST_SWEEPS = 64  # of the refinement; it ends by itself after a few
LEAST_IMPORTANCE = (
    1e-6  # of the row's mean, added to every importance: what calibration never touched still has a best centroid
)


@dataclass(frozen=True)
class SortedRows:
    """values: float64 [R, K], rising; weight_sums and value_sums: float64 [R, K + 1], sums of w and w x before each place."""

    values: Tensor
    weight_sums: Tensor
    value_sums: Tensor
    order: Tensor

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    def gain(self, start: Tensor, stop: Tensor) -> Tensor:
        """What one centroid for the run [start, stop) takes off sum w x^2; 0 for none. Indices int64, of any width: [R, *]."""
        weights = self.weight_sums.gather(1, stop) - self.weight_sums.gather(1, start)
        values = self.value_sums.gather(1, stop) - self.value_sums.gather(1, start)
        return torch.where(start < stop, values * values / weights, 0.0)

    def means(self, borders: Tensor) -> Tensor:
        """Weighted means float64 [R, S], within their run's values; NaN where a run is empty."""
        start, stop = borders[:, :-1], borders[:, 1:]
        weights = self.weight_sums.gather(1, stop) - self.weight_sums.gather(1, start)
        values = self.value_sums.gather(1, stop) - self.value_sums.gather(1, start)
        low = self.values.gather(1, start.clamp(max=self.columns - 1))
        high = self.values.gather(1, (stop - 1).clamp(min=0))
        return torch.where(start < stop, torch.minimum(torch.maximum(values / weights, low), high), torch.nan)


def sort_rows(weight: Tensor, importance: Tensor | None) -> SortedRows:
    """weight: float32 [R, K], finite; importance: float32 [R, K], finite, not negative, or None for equal ones."""
    values, order = (weight + 0.0).sort(dim=1, stable=True)  # -0.0 + 0.0 is 0.0: equal values have one form
    values = values.double()
    weights = torch.ones_like(values) if importance is None else importance.gather(1, order).double()
    if importance is not None:
        total = weights.cumsum(dim=1)[:, -1:]
        weights = torch.where(total > 0, weights + total / weights.shape[1] * LEAST_IMPORTANCE, 1.0)
    return SortedRows(values, _sums(weights), _sums(weights * values), order)


def _sums(terms: Tensor) -> Tensor:
    return torch.nn.functional.pad(terms.cumsum(dim=1), (1, 0))


def seed(rows: SortedRows, clusters: int) -> Tensor:
    """Borders int64 [R, clusters + 1]: the best on a grid of candidates, then refined until no single border can be moved to advantage."""
    borders = _best_of(rows, _candidates(rows, max(LEAST_CANDIDATES, 2 * clusters)), clusters)
    for _ in range(MOST_SWEEPS):
        before = borders.clone()
        # Borders of one parity at a time: their neighbours stand still.
        borders[:, 1::2] = split(rows, borders[:, ::2])
        around = torch.cat([borders[:, :1], borders[:, 1::2], borders[:, -1:]], dim=1)
        borders[:, 2:-1:2] = split(rows, around)[:, 1:-1]
        if torch.equal(borders, before):
            break
    return borders


def _candidates(rows: SortedRows, most: int) -> Tensor:
    """Places int64 [R, C + 1], rising, from 0 to K, at beginnings of equal values: all of a short row; `most` and the end of a long one.

    They lie densely where a fine quantizer has its borders: equal steps of the sum of sqrt(w * difference of neighbours), near the
    cube root of the point density that is best for many levels (Panter and Dite 1951) and free of functions that libraries round differently.
    """
    count, columns = len(rows.values), rows.columns
    places = torch.arange(columns, device=rows.values.device).expand(count, -1)
    differs = torch.nn.functional.pad(rows.values[:, 1:] != rows.values[:, :-1], (1, 0), value=True)
    if columns <= most:
        chosen = torch.where(differs, places, 0).cummax(dim=1).values
    else:
        weights = rows.weight_sums[:, 1:] - rows.weight_sums[:, :-1]
        steps = (weights[:, 1:] * (rows.values[:, 1:] - rows.values[:, :-1])).sqrt()
        sums = torch.nn.functional.pad(steps.cumsum(dim=1), (1, 0))
        shares = torch.arange(most, dtype=torch.float64, device=sums.device) / most
        chosen = torch.searchsorted(sums, sums[:, -1:] * shares)
    return torch.nn.functional.pad(chosen, (0, 1), value=columns)


def _best_of(rows: SortedRows, candidates: Tensor, clusters: int) -> Tensor:
    """Borders with the least error among candidates, by dynamic programming over the number of clusters; the earliest of equally good ones."""
    count = candidates.shape[1]
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count)).to(candidates.device)
    gains = rows.gain(candidates[:, pairs[:, 0]], candidates[:, pairs[:, 1]]).view(-1, count, count)
    forwards = torch.ones(count, count, dtype=torch.bool, device=gains.device).triu()
    gains = torch.where(forwards, gains, -torch.inf)  # [R, from, to]
    best, origins = gains[:, 0], []
    for _ in range(clusters - 1):
        best, origin = (best[:, :, None] + gains).max(dim=1)
        origins.append(origin)
    place = torch.full_like(candidates[:, :1], count - 1)
    chosen = [place]
    for origin in reversed(origins):
        place = origin.gather(1, place)
        chosen.append(place)
    return candidates.gather(1, torch.cat([torch.zeros_like(place), *reversed(chosen)], dim=1))


def split(rows: SortedRows, borders: Tensor) -> Tensor:
    """The best border within each run [R, S]: between unlike values, the first of equally good ones; the run's end where there is none."""
    places = torch.arange(1, rows.columns, device=borders.device).expand(len(borders), -1)
    run = torch.searchsorted(borders[:, 1:].contiguous(), places.contiguous(), right=True)
    start, stop = borders.gather(1, run), borders.gather(1, run + 1)
    allowed = (places > start) & (rows.values[:, 1:] != rows.values[:, :-1])
    gains = torch.where(allowed, rows.gain(start, places) + rows.gain(places, stop), -torch.inf)
    shape = (len(borders), borders.shape[1] - 1)
    best = gains.new_full(shape, -torch.inf).scatter_reduce(1, run, gains, "amax")
    found = torch.where(allowed & (gains == best.gather(1, run)), places, rows.columns)
    first = places.new_full(shape, rows.columns).scatter_reduce(1, run, found, "amin")
    return torch.minimum(first, borders[:, 1:])
