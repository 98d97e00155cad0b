"""Muon: momentum whose step is orthogonalized, for the two-dimensional matrices of the hidden layers.

Called by ``train``. Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (the quintic Newton-Schulz
iteration and its coefficients). Its arithmetic takes about a tenth of a training step of this model.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Push the singular values of each of ``matrices [n, rows, columns]`` towards 1 (to within about 0.3), in bfloat16."""
    a, b, c = COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x: torch.Tensor = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """One learning rate for all matrices; the step of a matrix is scaled by ``sqrt(max(1, rows / columns))``."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; matrices of one shape are orthogonalized together."""
        del closure
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = orthogonalize(torch.stack([self._nesterov(m, group["momentum"]) for m in matrices]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(matrix.dtype), alpha=-scale)

    def _nesterov(self, matrix: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        buffer = state.setdefault("momentum", torch.zeros_like(matrix))
        buffer.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(buffer, momentum)
