"""Tables fitted to what a linear's inputs are: the same codes, each output's centroids chosen together for the least error of its products.

Called by benchmarks after `quantize_any`, for widths of few bits, where it matters; planes and bytes stay what they were. The weighted mean of a cluster is the
best centroid if inputs are independent. They are not: with H, the sum of x x^T over tokens, the error of an output is (w - S c)^T H (w - S c) for its codes S
(one-hot, [K, 2^k]) and centroids c, least where S^T H S c = S^T H w. Knows nothing of where H comes from (`gptq.hessians`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from strata_runtime.precision.any_precision.parent import AnyParent
from strata_runtime.precision.errors import PrecisionError

WIDTHS = (3, 4, 5)  # beyond them the work grows with 2^k and nothing is left to gain
VALUES_AT_A_TIME = 1 << 22  # of rows x inputs x centroids: temporaries of 32 MB
_DAMP = 0.01  # of the mean of H's diagonal: directions that calibration hardly saw
_RIDGE, _LEAST_RIDGE = (
    1e-2,
    1e-3,
)  # of each centroid's own curvature, and of the mean: what few weights name stays where it was


def refit(parent: AnyParent, weight: Tensor, hessian: Tensor, *, widths: Sequence[int] = WIDTHS) -> AnyParent:
    """With other tables at `widths`; no output's error, as H weighs it, is larger than before. Tables need not rise any more.

    weight: [N, K], that of the parent; hessian: [K, K], the sum of x x^T, of any scale. Raises PrecisionError.
    """
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise PrecisionError(
            f"hessian {list(hessian.shape)}: a weight of {columns} inputs needs [{columns}, {columns}]"
        )
    scale = hessian.diagonal().mean()
    if not (torch.isfinite(hessian).all() and scale > 0):
        raise PrecisionError(
            f"hessian: its values must be finite and its diagonal positive; the mean is {float(scale):g}"
        )
    damped = hessian.float() / scale + _DAMP * torch.eye(columns, device=hessian.device)
    tables = dict(parent.tables)
    for bits in widths:
        tables[bits] = _fitted(parent.codes_at(bits), parent.tables[bits], weight, damped)
    return AnyParent(parent.codes, tables)


def _fitted(codes: Tensor, table: Tensor, weight: Tensor, hessian: Tensor) -> Tensor:
    """float16 [N, C]."""
    fitted = table.clone()
    count = table.shape[1]
    step = max(1, VALUES_AT_A_TIME // (codes.shape[1] * count))
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        named = one_hot(codes[rows].long(), count).float()  # [R, K, C]
        flat = named.transpose(0, 1).reshape(
            codes.shape[1], -1
        )  # one product of matrices: a batch of them would repeat H
        curved = (hessian @ flat).view(codes.shape[1], -1, count).transpose(0, 1)  # H S: [R, K, C]
        curvature = named.transpose(1, 2) @ curved  # S^T H S: [R, C, C]
        missed = weight[rows].float() - table[rows].float().gather(1, codes[rows].long())
        slope = torch.einsum("rkc,rk->rc", curved, missed)  # S^T H (w - S c)
        fitted[rows] = _moved(table[rows], curvature, slope)
    return fitted


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
