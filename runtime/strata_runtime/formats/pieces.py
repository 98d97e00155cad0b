"""A dense product with a weight that is brought back to the compute type some rows at a time: temporaries stay small, however large the operator.

Called by the kernels that decode or dequantize first; they give the rows. Knows no format.
"""

from collections.abc import Callable

from torch import Tensor

from strata_runtime.kernels.native_dense import multiply_once

# Rows of a piece are a multiple of these where they are more: products with rows of outputs that do not begin at whole 16 bytes take the vendors' libraries for GPUs
# up to nine times as long.
_TILE_ROWS = 256


def multiply_in_pieces(
    tokens: Tensor, shape: tuple[int, int], weights_at_a_time: int, rows: Callable[[int, int], Tensor]
) -> Tensor:
    """tokens [M, K] -> [M, N] for a weight of `shape` [N, K]; `rows(start, stop)` gives its rows [stop - start, K] in the tokens' type."""
    out_features, in_features = shape
    out = tokens.new_empty(tokens.shape[0], out_features)
    step = max(1, weights_at_a_time // max(1, in_features))
    if step > _TILE_ROWS:
        step -= step % _TILE_ROWS
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        out[:, start:stop] = multiply_once(tokens, rows(start, stop))
    return out
