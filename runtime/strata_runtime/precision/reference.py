"""What a quantized linear computes, in plain torch: dequantize, multiply in float32, round once.

The definition that every kernel is tested against, and the path for devices that have no kernel. Knows nothing of speed.
"""

import torch
from torch import Tensor

from strata_runtime.precision.quantizers import CODE_OFFSET


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


def quantize_tokens(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 activations with a scale per token: tokens [M, K] -> codes int8 [M, K], scales float32 [M, 1]."""
    values = tokens.float()
    scales = (values.abs().amax(dim=1, keepdim=True) / 127.0).clamp_min_(torch.finfo(torch.float32).tiny)
    return (values / scales).round_().clamp_(-127, 127).to(torch.int8), scales


def multiply_quantized(tokens: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The `w8a8` format: both sides int8, the sum exact (products below 2^14 over any number of inputs are exact in float64)."""
    token_codes, token_scales = quantize_tokens(tokens)
    product = (token_codes.double() @ codes.double().t()).float() * token_scales * scales
    return product.to(tokens.dtype)
