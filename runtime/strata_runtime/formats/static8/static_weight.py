"""The stored form of format `w8a8_static`: int8 weights, and how to round the inputs that come: factors and one scale found by calibration.

Made by `static_linear` while a checkpoint streams in. Knows nothing of how the factors were found (`activation_calibration`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_runtime.formats import reference
from strata_runtime.formats.quantizers import quantize_channels
from strata_runtime.ranges import Range


@dataclass(frozen=True)
class StaticWeight:
    """codes: int8 [N, K] of the weight times its factors; scales: float32 [N]; smoothing: [K] in the compute type, what inputs are divided
    by; activation_scale: float32 [], that of the divided inputs' codes.
    """

    codes: Tensor
    scales: Tensor
    smoothing: Tensor
    activation_scale: Tensor

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def part(self, columns: Range) -> "StaticWeight":
        """Of some inputs alone, with the scales of whole rows."""
        own = slice(*columns)
        return StaticWeight(
            self.codes[:, own].contiguous(), self.scales, self.smoothing[own].clone(), self.activation_scale
        )

    def dequantized(self) -> Tensor:
        """float32 [N, K], as it multiplies inputs that are not divided."""
        return reference.dequantize_channels(self.codes, self.scales) / self.smoothing.float()


def quantize_static(
    weight: Tensor, smoothing: Tensor, activation_scale: float, compute_dtype: torch.dtype
) -> StaticWeight:
    """weight: [N, K], finite; smoothing: [K], positive in the compute type."""
    factors = smoothing.to(device=weight.device, dtype=compute_dtype)
    stored = quantize_channels(weight, torch.float32, factors=factors)
    scale = torch.tensor(activation_scale, dtype=torch.float32, device=weight.device)
    return StaticWeight(stored.codes, stored.scales, factors, scale)
