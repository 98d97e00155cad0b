"""Eight-bit floats: rounding a matrix to `fp8_e4m3` or `fp8_e5m2` with one scale per row or one in all, and reading it back.

Called by `float8_linear` while a checkpoint streams in and by `float8_kernels` for activations. The numbers are those of the OCP 8-bit floating
point specification (rev. 1.0): e4m3 reaches 448 and has no infinity, e5m2 reaches 57344. Rounded to nearest even, saturating.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strata_planner.contract.formats import FormatName

Sharing = Literal["row", "tensor"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPE_OF_FORMAT: dict[FormatName, torch.dtype] = {
    "fp8_e4m3": E4M3,
    "fp8_e5m2": E5M2,
    "fp8_e4m3_tensor": E4M3,
    "fp8_e5m2_tensor": E5M2,
    "fp8_a8": E4M3,
}
ONE_SCALE: frozenset[FormatName] = frozenset({"fp8_e4m3_tensor", "fp8_e5m2_tensor"})
VALUES_AT_A_TIME = 1 << 18  # float32 temporaries stay within the cache

_SIGN = -(1 << 15)  # of 16 bits
_E4M3_PLACE, _E4M3_MASK = 7, 0x3F80  # its exponent and fraction where float16 has them: the value times 2^-8
_E4M3_BIAS = 256.0


@dataclass(frozen=True)
class Float8Weight:
    """codes: float8 [N, K], finite; scales: float32 [N], or [1] where all rows share it. `weight = code * scale`."""

    codes: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        scales = self.scales if self.scales.shape[0] == 1 else self.scales[start:stop]
        return decode(self.codes[start:stop]).mul_(scales[:, None])

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        return self.rows(0, self.out_features)


def quantize_float8(values: Tensor, dtype: torch.dtype, sharing: Sharing = "row") -> Float8Weight:
    """values: [N, K], any floating type; NaN stays NaN. The largest magnitude of a row (or of all) becomes the type's largest number."""
    largest = torch.finfo(dtype).max
    peaks = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    if sharing == "tensor":
        peaks = peaks.amax(dim=0, keepdim=True) if values.shape[0] else values.new_zeros(1)
    scales = (peaks.float() / largest).clamp_min_(torch.finfo(torch.float32).tiny)
    codes = torch.empty(values.shape, dtype=dtype, device=values.device)
    step = max(1, VALUES_AT_A_TIME // max(1, values.shape[1]))
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        divisors = scales if sharing == "tensor" else scales[rows]
        codes[rows] = (values[rows].float() / divisors[:, None]).clamp_(-largest, largest).to(dtype)
    return Float8Weight(codes, scales)


def decode(codes: Tensor) -> Tensor:
    """float8 (no NaN) -> float32, exactly.

    torch converts e4m3 number by number on CPUs; as float16 with a shifted exponent it takes a few operations on whole words, a sixth of the time.
    """
    if codes.device.type != "cpu" or codes.dtype not in {E4M3, E5M2}:
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    if codes.dtype == E5M2:
        return (bits << 8).view(torch.float16).float()
    magnitude = (bits << _E4M3_PLACE).bitwise_and_(_E4M3_MASK)
    return bits.bitwise_and_(_SIGN).bitwise_or_(magnitude).view(torch.float16).float().mul_(_E4M3_BIAS)
