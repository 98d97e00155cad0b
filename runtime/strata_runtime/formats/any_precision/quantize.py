"""`quantize_any`: a seed of few bits, and its clusters split in two again and again. Some rows at a time, natively where the library is there.

Knows nothing of where importances come from (`tools.calibration.fisher`) and of how planes are packed.
"""

import torch
from torch import Tensor

from strata_runtime.formats.any_precision import native
from strata_runtime.formats.any_precision.clusters import SortedRows, seed, sort_rows, split
from strata_runtime.formats.any_precision.parent import AnyParent
from strata_runtime.formats.errors import PrecisionError

MOST_BITS = 8
SEED_BITS = 3
WEIGHTS_AT_A_TIME = 1 << 18  # in torch: temporaries of some 50 MB
WEIGHTS_AT_A_TIME_NATIVE = 1 << 22  # two float32 copies: 32 MB

Tables = dict[int, Tensor]


def quantize_any(
    weight: Tensor, bits: int = MOST_BITS, *, importance: Tensor | None = None, seed_bits: int = SEED_BITS
) -> AnyParent:
    """The parent of `bits` bits of a weight [N, K], finite; every width from seed_bits on is in it (Any-Precision LLM, section 4).

    importance: Fisher diagonal, [N, K] or [K], finite and not negative; without it, or in rows where it is all zero, weights count alike.
    The seed minimises the weighted squared error of each output (SqueezeLLM, arXiv 2306.07629, section 4.1); then each cluster is split in
    two at its best border. The first k bits do not depend on `bits`. Raises PrecisionError.
    """
    _check(weight, bits, importance, seed_bits)
    out_features, in_features = weight.shape
    codes = torch.empty(out_features, in_features, dtype=torch.uint8, device=weight.device)
    widths = range(seed_bits, bits + 1)
    tables = {each: torch.empty(out_features, 1 << each, dtype=torch.float16, device=weight.device) for each in widths}
    natively = weight.device.type == "cpu" and native.library_here() is not None
    step = max(1, (WEIGHTS_AT_A_TIME_NATIVE if natively else WEIGHTS_AT_A_TIME) // in_features)
    run = native.cluster_rows if natively else cluster_rows
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        part = None if importance is None else importance.expand_as(weight)[rows].float()
        found = run(weight[rows].float(), part, seed_bits, bits, codes[rows])
        for width, table in found.items():
            tables[width][rows] = table.to(torch.float16)
    return AnyParent(codes, tables)


def cluster_rows(weight: Tensor, importance: Tensor | None, seed_bits: int, bits: int, codes: Tensor) -> Tables:
    """In torch: fills codes, uint8 [R, K]; gives tables float32 [R, 2^width]. weight and importance: float32 [R, K]."""
    rows = sort_rows(weight, importance)
    borders = seed(rows, 1 << seed_bits)
    means = _spread(rows.means(borders))
    tables = {seed_bits: means.float()}
    for width in range(seed_bits + 1, bits + 1):
        halves = split(rows, borders)
        borders = torch.cat([torch.stack([borders[:, :-1], halves], dim=2).flatten(1), borders[:, -1:]], dim=1)
        finer = rows.means(borders)
        means = torch.where(finer.isnan(), means.repeat_interleave(2, dim=1), finer)  # an empty half is its parent
        tables[width] = means.float()
    codes.copy_(_codes(rows, borders))
    return tables


def _spread(means: Tensor) -> Tensor:
    """Empty clusters of a seed take the centroid before them, the first ones that of the first cluster that holds something."""
    filled = ~means.isnan()
    places = torch.arange(means.shape[1], device=means.device).expand_as(means)
    before = torch.where(filled, places, -1).cummax(dim=1).values
    first = filled.int().argmax(dim=1, keepdim=True)
    return means.gather(1, torch.where(before < 0, first, before))


def _codes(rows: SortedRows, borders: Tensor) -> Tensor:
    places = torch.arange(rows.columns, device=borders.device).expand(len(borders), -1).contiguous()
    clusters = torch.searchsorted(borders[:, 1:].contiguous(), places, right=True).to(torch.uint8)
    return torch.empty_like(clusters).scatter_(1, rows.order, clusters)


def _check(weight: Tensor, bits: int, importance: Tensor | None, seed_bits: int) -> None:
    if not 1 <= seed_bits <= bits <= MOST_BITS:
        raise PrecisionError(
            f"{seed_bits} seed bits and {bits} bits: they must be 1 <= seed bits <= bits <= {MOST_BITS}"
        )
    if weight.ndim != 2 or not weight.is_floating_point() or not weight.numel():
        raise PrecisionError(f"weight {weight.dtype} {list(weight.shape)} must be a floating-point matrix [N, K]")
    most = torch.finfo(torch.float16).max
    low, high = (float(each) for each in weight.aminmax())
    if not -most <= low <= high <= most:
        raise PrecisionError(
            f"the weight reaches from {low:g} to {high:g}; tables of centroids (float16) hold at most {most:g}"
        )
    if importance is None:
        return
    if importance.shape not in {weight.shape, weight.shape[1:]}:
        raise PrecisionError(
            f"importance {list(importance.shape)} must have the weight's shape {list(weight.shape)} or its columns'"
        )
    low, high = (float(each) for each in importance.aminmax())
    if not 0 <= low <= high < torch.inf:
        raise PrecisionError(f"importance reaches from {low:g} to {high:g}; it must be finite and not negative")
