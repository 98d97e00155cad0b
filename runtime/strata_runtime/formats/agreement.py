"""Whether a kernel computes what the reference of its format does: the same sums up to rounding.

Asked on the very machine, before a kernel that was not tried on it is put in charge (`kernel_timing`, `humming_kernels`). Knows no kernel and no
format.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from strata_runtime.formats.pieces import multiply_in_pieces

# Roundings to the compute type by which two kernels may differ, of weights, of partial sums and of the result: one product, and the mean of many.
MOST_ROUNDINGS = 8.0
MEAN_ROUNDINGS = 2.0
_FLOAT32_UNIT = 2.0**-23


def size_of_sums(
    tokens: Tensor, shape: tuple[int, int], weights_at_a_time: int, rows: Callable[[int, int], Tensor]
) -> Tensor:
    """How large the sums of tokens [M, K] and a weight of `shape` [N, K] are when signs fall by chance: float32 [M, N].

    `rows(start, stop)` gives rows of the weight as float32 [stop - start, K], and may be overwritten.
    """
    return multiply_in_pieces(
        tokens.float().square(), shape, weights_at_a_time, lambda *part: rows(*part).square_()
    ).sqrt_()


def disagreement(found: Tensor, expected: Tensor, size: Tensor, terms: int) -> str | None:
    """None where `found` [M, N] is `expected` up to rounding, otherwise why not, for people.

    size: as `size_of_sums`; terms: K. A weight that was read from a wrong place, or with another scale or zero, differs by a share of `size` that no
    rounding explains; relative to the result alone, sums near zero would not agree with themselves. Means over the tokens of an output
    and the outputs of a token find what is wrong everywhere by less than the worst rounding.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"it gives {found.dtype} {list(found.shape)}, and {expected.dtype} {list(expected.shape)} is the product"
    rounding = torch.finfo(expected.dtype).eps / 2 + terms**0.5 * _FLOAT32_UNIT
    one = (expected.float().abs() + size).mul_(rounding).clamp_min_(torch.finfo(torch.float32).tiny)
    error = (found.float() - expected.float()).abs_().div_(one)
    worst = float(error.max())
    if not worst <= MOST_ROUNDINGS:  # so that NaN is wrong
        return f"{int((~(error <= MOST_ROUNDINGS)).sum())} of {found.numel()} results differ by up to {worst:.3g} roundings"
    for dim, each in ((0, "an output"), (1, "a token")):
        mean = float(error.square().mean(dim).sqrt().max())
        most = MEAN_ROUNDINGS + (MOST_ROUNDINGS - MEAN_ROUNDINGS) / error.shape[dim] ** 0.5
        if mean > most:
            return f"the results of {each} differ by {mean:.3g} roundings in the mean of {error.shape[dim]}"
    return None
