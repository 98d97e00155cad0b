"""Tables fitted to what a linear's inputs are: the same codes, each output's centroids chosen together for the least error of its products.

Called by `strata quantize` after `quantize_any` where a text calibrates; planes and bytes stay what they were. The weighted mean of a cluster is the best
centroid if inputs are independent. They are not: with H, the sum of x x^T over tokens, the error of an output is (w - S c)^T H (w - S c) for its codes S
(one-hot, [K, 2^k]) and centroids c, least where S^T H S c = S^T H w: the closed-form codebook of layer-wise non-uniform quantization (GuidedQuant, arXiv 2505.07004). A coarser width has the clusters of a finer one two by two, so S^T H S of the finest holds those of all. Knows nothing of where H comes from
(`tools.calibration.hessians`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from strata_runtime.formats.any_precision import native
from strata_runtime.formats.any_precision.parent import AnyParent
from strata_runtime.formats.errors import PrecisionError

WIDTHS = (3, 4, 5)  # beyond them nothing is left to gain
VALUES_AT_A_TIME = 1 << 22  # of rows x inputs x centroids, in torch: temporaries of 32 MB
WEIGHTS_AT_A_TIME_NATIVE = 1 << 21  # codes as indices and errors: 24 MB
_DAMP = 0.01  # of the mean of H's diagonal: directions that calibration hardly saw
# Of each centroid's own curvature, and of the mean: what few weights name stays where it was.
_RIDGE, _LEAST_RIDGE = 1e-2, 1e-3


def refit(parent: AnyParent, weight: Tensor, hessian: Tensor, *, widths: Sequence[int] = WIDTHS) -> AnyParent:
    """With other tables at `widths`; no output's error, as H weighs it, is larger than before. Tables need not rise any more.

    weight: [N, K], that of the parent; hessian: [K, K], the sum of x x^T, of any scale. Raises PrecisionError.
    """
    out_features, in_features = weight.shape
    _check(hessian, in_features)
    if not widths:
        return parent
    count = 1 << max(widths)
    codes, finest = parent.codes_at(max(widths)), parent.tables[max(widths)].float()
    natively = weight.device.type == "cpu" and native.library_here() is not None
    run = native.curved if natively else curved
    step = max(1, WEIGHTS_AT_A_TIME_NATIVE // in_features if natively else VALUES_AT_A_TIME // (in_features * count))
    hessian = hessian.float().contiguous()
    damp = _DAMP * hessian.diagonal().mean()
    tables = {bits: parent.tables[bits].clone() for bits in widths}
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        places = codes[rows].long()
        missed = weight[rows].float() - finest[rows].gather(1, places)
        curvature, slope = run(codes[rows], missed, hessian, count)
        named = torch.zeros_like(slope).scatter_add_(1, places, torch.ones_like(missed))
        curvature.diagonal(dim1=1, dim2=2).add_(damp * named)
        slope += damp * torch.zeros_like(slope).scatter_add_(1, places, missed)
        for table in tables.values():
            table[rows] = _moved(table[rows], *_coarser(curvature, slope, finest[rows], table[rows].float()))
    return AnyParent(parent.codes, {**parent.tables, **tables})


def curved(codes: Tensor, missed: Tensor, hessian: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """In torch: S^T H S [R, count, count] and S^T H e [R, count] for codes [R, K] below count and errors e, float32 [R, K]."""
    rows, columns = codes.shape
    named = one_hot(codes.long(), count).float()  # S: [R, K, C]
    flat = named.transpose(0, 1).reshape(columns, -1)  # one product of matrices: a batch of them would repeat H
    sums = (hessian @ flat).view(columns, rows, count).transpose(0, 1)  # H S: [R, K, C]
    return named.transpose(1, 2) @ sums, torch.einsum("rkc,rk->rc", sums, missed)


def _coarser(curvature: Tensor, slope: Tensor, finest: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Curvature and slope of `table` [R, C], whose clusters are runs of those of `finest` [R, F], from theirs: its errors are theirs and what lies between."""
    rows, count = table.shape
    run = finest.shape[1] // count
    between = finest - table.repeat_interleave(run, dim=1)
    slope = slope + (curvature @ between[..., None])[..., 0]
    return curvature.view(rows, count, run, count, run).sum(dim=(2, 4)), slope.view(rows, count, run).sum(dim=2)


def _moved(table: Tensor, curvature: Tensor, slope: Tensor) -> Tensor:
    """Each row's centroids where its error falls, as they are stored; the old ones where it would not."""
    own = curvature.diagonal(dim1=1, dim2=2)
    ridge = _RIDGE * own + _LEAST_RIDGE * own.mean(dim=1, keepdim=True)
    step = torch.linalg.solve(curvature + torch.diag_embed(ridge), slope)
    stored = (table.float() + step).to(torch.float16)
    taken = stored.float() - table.float()
    change = (taken * (curvature @ taken[..., None])[..., 0]).sum(dim=1) - 2 * (taken * slope).sum(dim=1)
    better = (change < 0) & torch.isfinite(stored).all(dim=1)
    return torch.where(better[:, None], stored, table)


def _check(hessian: Tensor, columns: int) -> None:
    if hessian.shape != (columns, columns):
        raise PrecisionError(
            f"hessian {list(hessian.shape)}: a weight of {columns} inputs needs [{columns}, {columns}]"
        )
    low, high = (float(each) for each in hessian.aminmax())
    mean = float(hessian.diagonal().mean())
    if not (-torch.inf < low <= high < torch.inf and mean > 0):
        raise PrecisionError(
            f"hessian from {low:g} to {high:g}: its values must be finite and its diagonal positive; the mean is {mean:g}"
        )
