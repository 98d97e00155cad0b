"""Products with a GptqWeight (`gptq2` ... `gptq8`), and the rule that picks one. Called by `GptqLinear` on every forward pass.

All have the same arithmetic: activations stay in the compute type, sums are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_runtime.precision import native_planes, triton_products
from strata_runtime.precision.gptq.weight import GptqWeight
from strata_runtime.precision.pieces import multiply_in_pieces

WEIGHTS_AT_A_TIME = 1 << 20  # decoded at once: temporaries of 14 MB
WEIGHTS_AT_A_TIME_ON_CUDA = 1 << 26
ANY_TOKENS = 1 << 62


@dataclass(frozen=True)
class GptqKernel:
    """`run(tokens [M, K] in the order of the planes, weight) -> [M, N]`, without bias, if `runs`; the fastest up to `most_tokens`."""

    name: str
    runs: Callable[[Tensor, GptqWeight], bool]
    run: Callable[[Tensor, GptqWeight], Tensor]
    most_tokens: int = ANY_TOKENS


def native_runs(tokens: Tensor, weight: GptqWeight) -> bool:
    return native_planes.takes(tokens, weight.planes)


def native(tokens: Tensor, weight: GptqWeight) -> Tensor:
    """Straight from the planes, in the native library."""
    stored = (weight.planes, weight.scales, weight.zeros, weight.group)
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.strata.planes_group_linear(tokens, *stored)
        return product
    return native_planes.planes_group_linear(tokens, *stored)  # without the dispatcher's two microseconds


def dequantized(tokens: Tensor, weight: GptqWeight) -> Tensor:
    """Some rows of the weight to the compute type, then a dense product: what every other kernel is tested against."""
    at_a_time = WEIGHTS_AT_A_TIME_ON_CUDA if tokens.is_cuda else WEIGHTS_AT_A_TIME

    def rows(start: int, stop: int) -> Tensor:
        return weight.stored_rows(start, stop).to(tokens.dtype)

    return multiply_in_pieces(tokens, (weight.out_features, weight.in_features), at_a_time, rows)


def _always(_tokens: Tensor, _weight: GptqWeight) -> bool:
    return True


GPTQ_KERNELS: tuple[GptqKernel, ...] = (
    GptqKernel("gptq-native", native_runs, native),
    GptqKernel(
        "gptq-triton", triton_products.product_runs, triton_products.product, most_tokens=triton_products.MOST_TOKENS
    ),
    GptqKernel("gptq-triton-dequantized", triton_products.product_runs, triton_products.dequantized),
    GptqKernel("gptq-dequantized", _always, dequantized),
)


def multiply(tokens: Tensor, weight: GptqWeight) -> Tensor:
    """tokens [M, K] in the model's order of inputs -> [M, N], by the first kernel that runs here for so many tokens."""
    gathered, count = weight.gathered(tokens), tokens.shape[0]
    kernel = next(each for each in GPTQ_KERNELS if count <= each.most_tokens and each.runs(gathered, weight))
    return kernel.run(gathered, weight)
