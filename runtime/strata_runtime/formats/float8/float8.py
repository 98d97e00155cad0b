"""Eight-bit floats: rounding a matrix to e4m3 with one scale per row, and reading it back.

Called by `float8_linear` while a checkpoint streams in and by `float8_kernels` for activations. The numbers are those of the OCP 8-bit floating
point specification (rev. 1.0): e4m3 reaches 448 and has no infinity. Rounded to nearest even, saturating.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_planner.contract.formats import FormatName

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
FLOAT8: tuple[FormatName, ...] = ("fp8_e4m3", "fp8_a8")
VALUES_AT_A_TIME = 1 << 18  # float32 temporaries stay within the cache

_SIGN = -(1 << 15)  # of 16 bits
_E4M3_PLACE, _E4M3_MASK = 7, 0x3F80  # its exponent and fraction where float16 has them: the value times 2^-8
_E4M3_BIAS = 256.0


@dataclass(frozen=True)
class Float8Weight:
    """codes: float8 [N, K], finite; scales: float32 [N]. `weight = code * scale`."""

    codes: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        return decode(self.codes[start:stop]).mul_(self.scales[start:stop, None])

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        return self.rows(0, self.out_features)


def quantize_float8(values: Tensor) -> Float8Weight:
    """values: [N, K], any floating type; NaN stays NaN. The largest magnitude of a row becomes the type's largest number."""
    peaks = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    scales = (peaks.float() / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    codes = torch.empty(values.shape, dtype=E4M3, device=values.device)
    step = max(1, VALUES_AT_A_TIME // max(1, values.shape[1]))
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        codes[rows] = (values[rows].float() / scales[rows, None]).clamp_(-LARGEST, LARGEST).to(E4M3)
    return Float8Weight(codes, scales)


def decode(codes: Tensor) -> Tensor:
    """e4m3 (no NaN) -> float32, exactly.

    torch converts it number by number on CPUs; as float16 with a shifted exponent it takes a few operations on whole words, a sixth of the time.
    """
    if codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    magnitude = (bits << _E4M3_PLACE).bitwise_and_(_E4M3_MASK)
    return bits.bitwise_and_(_SIGN).bitwise_or_(magnitude).view(torch.float16).float().mul_(_E4M3_BIAS)
