"""How large activations are: a histogram of magnitudes that grows with what it sees, and the clipping thresholds that follow from it.

Filled by `activation_calibration`. Bins are powers of two wide and merge in pairs when the range doubles, so that a histogram depends on the
values alone, not on their order or on how they were cut into batches. The thresholds are the two calibrations of static quantization:
MinMax takes the largest magnitude, entropy the one at which 8-bit values tell most of the distribution (S. Migacz, "8-bit inference with
TensorRT", GTC 2017).
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from strata_runtime.formats.errors import ActivationNotFiniteError

CalibrationMethod = Literal["minmax", "entropy"]
Counts = npt.NDArray[np.int64]

BINS = 2048
LEVELS = 128  # magnitudes of symmetric int8
LEVELS_TOP = LEVELS - 1
NEVER_SEEN = 1e-4  # of a value: what a level counts that is empty but for what was clipped to it
CANDIDATE_STEP = 8  # bins between the thresholds that are tried: less than a hundredth of the range


class MagnitudeHistogram:
    """`counts[i]`: how many |values| lie in [i, i + 1) * width. `peak`: the largest."""

    def __init__(self) -> None:
        self.counts: Counts = np.zeros(BINS, dtype=np.int64)
        self.peak = 0.0
        self._exponent: int | None = None  # the range is 2^exponent

    @property
    def width(self) -> float:
        return 0.0 if self._exponent is None else math.ldexp(1.0, self._exponent) / BINS

    def add(self, values: Tensor) -> None:
        """Any shape and floating type. Raises ActivationNotFiniteError for NaN or infinity."""
        if not values.numel():
            return
        magnitudes = values.detach().flatten().abs().to(torch.float64)
        peak = float(magnitudes.max())
        if not math.isfinite(peak):
            raise ActivationNotFiniteError(
                f"{int((~torch.isfinite(values)).sum())} of {values.numel()} activations are NaN or infinite: the model diverges "
                "on this text in this arithmetic; calibrate in float32, or check the checkpoint"
            )
        self._make_room(peak)
        self.peak = max(self.peak, peak)
        if self._exponent is None:  # nothing but zeros so far
            self.counts[0] += magnitudes.numel()
            return
        places = (magnitudes / self.width).to(torch.int64)
        self.counts += torch.bincount(places, minlength=BINS).cpu().numpy()

    def _make_room(self, peak: float) -> None:
        if peak == 0.0:
            return
        exponent = math.frexp(peak)[1]  # peak < 2^exponent
        if self._exponent is None:
            self._exponent = exponent
        while self._exponent < exponent:
            merged = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate((merged, np.zeros_like(merged)))
            self._exponent += 1


def minmax_threshold(histogram: MagnitudeHistogram) -> float:
    return histogram.peak


def entropy_threshold(histogram: MagnitudeHistogram) -> float:
    """The magnitude to clip at for which the distribution of 128 levels diverges least (Kullback-Leibler) from the clipped one.

    What lies beyond a threshold counts in its last bin, as clipping would have it.
    """
    counts = np.trim_zeros(histogram.counts, "b").astype(np.float64)
    if len(counts) <= LEVELS:
        return histogram.peak
    candidates = [*range(LEVELS, len(counts), CANDIDATE_STEP), len(counts)]
    best = min(candidates, key=lambda bins: (_divergence(counts, bins), -bins))
    return float(min(best * histogram.width, histogram.peak))


THRESHOLDS: dict[CalibrationMethod, Callable[[MagnitudeHistogram], float]] = {
    "minmax": minmax_threshold,
    "entropy": entropy_threshold,
}


def scale_of(threshold: float) -> float:
    """Of symmetric int8 codes that reach to `threshold`; inputs that were always zero get one that still divides."""
    return threshold / LEVELS_TOP or 1.0


def _divergence(counts: npt.NDArray[np.float64], bins: int) -> float:
    """KL(P || Q): P the first `bins` bins with the rest in the last, Q those bins in 128 levels, spread again over P's support."""
    kept = counts[:bins]
    clipped = kept.copy()
    clipped[-1] += counts[bins:].sum()
    support = clipped > 0
    starts = np.arange(LEVELS) * bins // LEVELS
    levels = np.add.reduceat(kept, starts) / np.maximum(np.add.reduceat(support, starts), 1)
    spread = np.maximum(np.repeat(levels, np.diff(starts, append=bins))[support], NEVER_SEEN)
    p, q = clipped[support] / clipped.sum(), spread / spread.sum()
    return float((p * np.log(p / q)).sum())
