"""Products with a PlanesWeight (`any3` ... `any8`). Listed and chosen in `kernels`.

Activations stay in the compute type and sums are float32, whichever kernel runs.
"""

import torch
from torch import Tensor

from strata_runtime.precision.weights import PlanesWeight

WEIGHTS_AT_A_TIME = 1 << 20  # decoded at once: temporaries of 12 MB
WEIGHTS_AT_A_TIME_ON_CUDA = 1 << 26


def dequantized(tokens: Tensor, weight: PlanesWeight) -> Tensor:
    """Some rows of the weight to the compute type, then a dense product: what every other kernel is tested against."""
    out = tokens.new_empty(tokens.shape[0], weight.out_features)
    step = max(1, (WEIGHTS_AT_A_TIME_ON_CUDA if tokens.is_cuda else WEIGHTS_AT_A_TIME) // weight.in_features)
    for start in range(0, weight.out_features, step):
        rows = weight.dequantized_rows(start, min(start + step, weight.out_features))
        out[:, start : start + step] = torch.nn.functional.linear(tokens, rows.to(tokens.dtype))
    return out
