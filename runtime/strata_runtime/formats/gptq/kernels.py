"""Products with a GptqWeight (`gptq2` ... `gptq8`): the table of kernels, as in `formats.kernels`. Called by `GptqLinear` on every forward pass.

All have the same arithmetic: activations stay in the compute type, sums are float32. A weight may also be held in the layout of
`humming-kernels` instead of planes (`humming_kernels`): where it was measured to be the fastest of a GPU whatever the number of tokens,
since the planes are gone then.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from strata_planner.contract.formats import GPTQ
from strata_runtime.formats import measured
from strata_runtime.formats.gptq import humming_kernels
from strata_runtime.formats.gptq.humming_kernels import RepackedWeight
from strata_runtime.formats.gptq.weight import GptqWeight
from strata_runtime.formats.kernels import Kernel, select
from strata_runtime.formats.pieces import multiply_in_pieces
from strata_runtime.formats.planes import triton_products
from strata_runtime.kernels import native_planes

log = logging.getLogger(__name__)

WEIGHTS_AT_A_TIME = 1 << 20  # decoded at once: temporaries of 14 MB
WEIGHTS_AT_A_TIME_ON_CUDA = 1 << 26
HUMMING = "gptq-humming"  # in the measured table


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


GPTQ_KERNELS: tuple[Kernel[GptqWeight], ...] = tuple(
    kernel
    for name in GPTQ.values()
    for kernel in (
        Kernel("gptq-native", name, "16-bit activations", native_runs, native),
        Kernel[GptqWeight](
            "gptq-triton",
            name,
            "16-bit activations",
            triton_products.product_runs,
            triton_products.product,
            most_tokens=triton_products.MOST_TOKENS,
        ),
        Kernel[GptqWeight](
            "gptq-triton-dequantized",
            name,
            "16-bit activations",
            triton_products.product_runs,
            triton_products.dequantized,
        ),
        Kernel("gptq-dequantized", name, "16-bit activations", _always, dequantized),
    )
)


def multiply(tokens: Tensor, weight: GptqWeight | RepackedWeight) -> Tensor:
    """tokens [M, K] in the model's order of inputs -> [M, N], by the fastest kernel that runs here for so many tokens."""
    gathered = weight.gathered(tokens)
    if isinstance(weight, RepackedWeight):
        return weight.product(gathered)
    return select(GPTQ_KERNELS, GPTQ[weight.bits], gathered, weight).run(gathered, weight)


def repacked_if_fastest(weight: GptqWeight, dtype: torch.dtype) -> RepackedWeight | None:
    """The weight in the layout of humming-kernels, checked; None where that was not measured to be the fastest, or for a reason that is logged."""
    name = GPTQ[weight.bits]
    if measured.fastest(name, dtype, 1, weight.scales.device) != HUMMING:
        return None
    library = humming_kernels.installed()
    found = library if isinstance(library, str) else humming_kernels.repack(weight, dtype, library, dequantized)
    if isinstance(found, str):
        _say_once(f"{name} stays in bit-planes, without humming-kernels: {found}")
        return None
    return found


@cache
def _say_once(line: str) -> None:
    """Not for every linear of a model."""
    log.warning(line)
