"""Products with a PlanesWeight (`any3` ... `any8`, `any4_a8`). Listed and chosen in `kernels`.

`any3` ... `any8`: activations stay in the compute type and sums are float32, whichever kernel runs. `any4_a8`: activations are rounded to int8 with a scale
per token, as in `w8a8`, and centroids to int8 with a scale per output; sums are exact, so its kernels agree in every bit.
"""

import torch
from torch import Tensor

from strata_runtime.formats import reference
from strata_runtime.formats.pieces import multiply_in_pieces
from strata_runtime.formats.planes.planes import unpack_planes
from strata_runtime.formats.quantizers import quantize_channels
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.kernels import native_dense, native_planes

WEIGHTS_AT_A_TIME = 1 << 20  # decoded at once: temporaries of 12 MB
NATIVE_WEIGHTS_AT_A_TIME = 1 << 19  # of 16 bits they stay in the cache until they are multiplied
WEIGHTS_AT_A_TIME_ON_CUDA = 1 << 26


def native_runs(tokens: Tensor, weight: PlanesWeight) -> bool:
    return native_planes.takes(tokens, weight.planes) and tokens.dtype == weight.table.dtype


def native(tokens: Tensor, weight: PlanesWeight) -> Tensor:
    """Straight from the planes, in the native library."""
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.strata.planes_linear(tokens, weight.planes, weight.table)
        return product
    return native_planes.stored_linear(tokens, weight.native)  # without the dispatcher's two microseconds


def decodes_itself(tokens: Tensor) -> bool:
    """Whether `decoded` is one call of the native library."""
    return native_dense.alone(tokens.dtype, tokens.device)


def decoded(tokens: Tensor, weight: PlanesWeight) -> Tensor:
    """Some rows of the weight to the compute type by the native library, then a dense product: its own where that is the only one, else torch's."""
    if decodes_itself(tokens):
        return native_planes.decoded_linear(tokens, weight.native)

    def rows(start: int, stop: int) -> Tensor:
        planes = [plane[start:stop] for plane in weight.planes]
        return native_planes.decoded(planes, weight.table[start:stop], weight.in_features)

    return multiply_in_pieces(tokens, (weight.out_features, weight.in_features), NATIVE_WEIGHTS_AT_A_TIME, rows)


def dequantized(tokens: Tensor, weight: PlanesWeight) -> Tensor:
    """Some rows of the weight to the compute type, then a dense product: what every other kernel is tested against."""
    at_a_time = WEIGHTS_AT_A_TIME_ON_CUDA if tokens.is_cuda else WEIGHTS_AT_A_TIME

    def rows(start: int, stop: int) -> Tensor:
        return weight.dequantized_rows(start, stop).to(tokens.dtype)

    return multiply_in_pieces(tokens, (weight.out_features, weight.in_features), at_a_time, rows)


def native_int8_runs(tokens: Tensor, weight: PlanesWeight) -> bool:
    return native_runs(tokens, weight) and weight.in_features <= native_planes.MOST_INPUTS_INT8


def native_int8(tokens: Tensor, weight: PlanesWeight) -> Tensor:
    """`any4_a8` straight from the planes, in the native library."""
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.strata.planes_linear_int8(tokens, weight.planes, weight.table)
        return product
    return native_planes.stored_linear_int8(tokens, weight.native)


def reference_int8(tokens: Tensor, weight: PlanesWeight) -> Tensor:
    """What `any4_a8` means, in plain torch."""
    centroids = quantize_channels(weight.table, torch.float32)
    codes = unpack_planes(weight.planes, weight.in_features)
    return reference.multiply_quantized(tokens, centroids.codes.gather(1, codes.long()), centroids.scales)
