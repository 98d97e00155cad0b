"""What a quantized linear computes, in plain torch: dequantize, multiply in float32, round once.

The definition that every kernel is tested against, and the path for devices that have no kernel. Knows nothing of speed.
"""

from typing import Literal

import torch
from torch import Tensor

from strata_runtime.formats.quantizers import CODE_OFFSET

Granularity = Literal["token", "tensor"]


def dequantize_channels(codes: Tensor, scales: Tensor) -> Tensor:
    """codes int8 [N, K], scales [N] -> float32 [N, K]."""
    return codes.float() * scales.float()[:, None]


def dequantize_groups(codes: Tensor, scales_and_zeros: Tensor) -> Tensor:
    """codes uint8 [N, K], scales_and_zeros [K / group, N, 2] -> float32 [N, K]."""
    groups, out_features, _ = scales_and_zeros.shape
    scales, zeros = scales_and_zeros.float().transpose(0, 1).unbind(2)
    steps = codes.view(out_features, groups, -1).float() - CODE_OFFSET
    return torch.addcmul(zeros[..., None], steps, scales[..., None]).reshape(out_features, -1)


def multiply(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [M, K] of the compute type, weight float32 [N, K] -> [M, N] in the compute type."""
    return torch.nn.functional.linear(tokens.float(), weight).to(tokens.dtype)


def quantize_tokens(tokens: Tensor, granularity: Granularity = "token") -> tuple[Tensor, Tensor]:
    """Symmetric int8 activations with a scale per token, or one of all: tokens [M, K] -> codes int8 [M, K], scales float32 [M, 1].

    One scale of all tokens makes a token's result depend on the batch that it came in: to compare with, never to serve.
    """
    values = tokens.float()
    peaks = values.abs().amax(dim=1, keepdim=True)
    if granularity == "tensor" and peaks.numel():
        peaks = peaks.amax().expand_as(peaks)
    scales = (peaks / 127.0).clamp_min(torch.finfo(torch.float32).tiny)
    return (values / scales).round_().clamp_(-127, 127).to(torch.int8), scales


def quantize_tokens_static(tokens: Tensor, smoothing: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a scale known before: tokens [M, K], smoothing [K], scale [] -> codes int8 [M, K], scales float32 [M, 1].

    Values beyond the calibrated range are clipped to it. A token that holds NaN or infinity has the scale NaN, so that it shows.
    """
    steps = tokens.float() / (smoothing.float() * scale)
    scales = (steps * 0).sum(dim=1, keepdim=True).add_(scale)
    return steps.round_().clamp_(-127, 127).to(torch.int8), scales


def multiply_codes(token_codes: Tensor, codes: Tensor) -> Tensor:
    """int8 [M, K], int8 [N, K] -> float32 [M, N]: products below 2^14 over any number of inputs are exact in float64."""
    return (token_codes.double() @ codes.double().t()).float()


def multiply_quantized(tokens: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The `w8a8` format: both sides int8, the sum exact."""
    token_codes, token_scales = quantize_tokens(tokens)
    return (multiply_codes(token_codes, codes) * token_scales * scales).to(tokens.dtype)
