"""Smoothing: dividing inputs by a factor each and multiplying the weight's columns by it, so that outliers move where they round well.

Called by `activation_calibration`. SmoothQuant, Xiao et al., arXiv 2211.10438, section 4: s_j = max|X_j|^alpha / max|W_j|^(1 - alpha). Here the
factors belong to one linear and are applied as activations are rounded, instead of being folded into the norm before: so every linear can have them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from strata_runtime.formats.static8.static_kernels import reference_product
from strata_runtime.formats.static8.static_weight import quantize_static
from strata_runtime.tools.calibration.activation_histogram import MagnitudeHistogram, scale_of

ALPHAS = (0.35, 0.5, 0.65, 0.8)
LARGEST_FACTOR = 2.0**14  # and its inverse: within float16


def smoothing_factors(input_peaks: Tensor, weight_peaks: Tensor, alpha: float) -> Tensor:
    """input_peaks, weight_peaks: max|X_j|, max|W_j| [K] -> factors float32 [K], positive, with a geometric mean of 1.

    Inputs that were always zero, or that nothing weighs, keep the factor 1.
    """
    live = (input_peaks > 0) & (weight_peaks > 0)
    logs = alpha * input_peaks.double().log() - (1 - alpha) * weight_peaks.double().log()
    if not live.any():
        return torch.ones_like(input_peaks, dtype=torch.float32)
    logs = torch.where(live, logs - logs[live].mean(), 0.0)
    return logs.exp().clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR).float()


def best_smoothing(
    inputs: Tensor, weight: Tensor, input_peaks: Tensor, threshold: Callable[[MagnitudeHistogram], float]
) -> tuple[float | None, Tensor]:
    """The alpha (None: no smoothing) with the least squared error of the product over sampled inputs, and its factors.

    inputs: [tokens, K], weight: [N, K]; `threshold`: the calibration that the scale will come from.
    """
    exact = inputs.float() @ weight.float().t()
    weight_peaks = weight.abs().amax(dim=0).float()
    choices: list[tuple[float | None, Tensor]] = [(None, torch.ones_like(input_peaks, dtype=torch.float32))]
    choices += [(alpha, smoothing_factors(input_peaks, weight_peaks, alpha)) for alpha in ALPHAS]

    def error(choice: tuple[float | None, Tensor]) -> float:
        histogram = MagnitudeHistogram()
        histogram.add(inputs.float() / choice[1])
        stored = quantize_static(weight, choice[1], scale_of(threshold(histogram)), torch.float32)
        return float((reference_product(inputs.float(), stored) - exact).square().sum())

    return min(choices, key=error)
