"""The Hessian's view of sensitivity, the peer of `benchmarks.sensitivity`: curvature of the loss in each linear's weight.

HAWQ (Dong et al. 2019): omega = top eigenvalue of the weight's block of the Hessian x |W - Q(W)|^2, by power iteration; HAWQ-V2 (Dong
et al. 2020): mean of its eigenvalues in place of the largest, by Hutchinson's estimate of the trace. Both on transformers'
own model, whose attention can be differentiated twice; one graph of the gradient serves all products.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

LinearKey = tuple[int, str]  # layer, path in it


@dataclass(frozen=True)
class Curvature:
    """Per linear; `seconds`: of this process on its threads."""

    values: dict[LinearKey, float]
    seconds: float
    products: int


class Hessian:
    """Products with the Hessian of the mean loss of some windows."""

    def __init__(self, folder: Path, windows: Sequence[torch.Tensor]) -> None:
        started = time.process_time()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        model.requires_grad_(requires_grad=False)
        self.weights = {
            (index, name): child.weight.requires_grad_()
            for index, layer in enumerate(model.model.layers)
            for name, child in layer.named_modules()
            if isinstance(child, nn.Linear)
        }
        ids = torch.stack(list(windows))
        logits = model(input_ids=ids[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self._gradients = dict(
            zip(self.weights, torch.autograd.grad(loss, list(self.weights.values()), create_graph=True), strict=True)
        )
        self.seconds = time.process_time() - started
        self._draw = torch.Generator().manual_seed(0)

    def top_eigenvalues(self, tolerance: float, most: int) -> Curvature:
        """Power iteration in each block until the estimate moves by less than `tolerance` of itself, or `most` products."""
        started, products = time.process_time(), 0
        values = {}
        for key, weight in self.weights.items():
            vector = torch.randn(weight.shape, generator=self._draw)
            value = 0.0
            for _ in range(most):
                vector /= vector.norm()
                (product,) = torch.autograd.grad(self._gradients[key], weight, vector, retain_graph=True)
                products += 1
                before, value = value, float((vector * product).sum())
                vector = product
                if abs(value - before) <= tolerance * abs(value):
                    break
            values[key] = abs(value)
        return Curvature(values, self.seconds + time.process_time() - started, products)

    def mean_eigenvalues(self, probes: int) -> Curvature:
        """Hutchinson: the mean of v . H v over random signs v, all blocks at once (their cross terms have mean zero)."""
        started = time.process_time()
        sums = dict.fromkeys(self.weights, 0.0)
        for _ in range(probes):
            signs = [
                torch.randint(0, 2, weight.shape, generator=self._draw).mul_(2).sub_(1).float()
                for weight in self.weights.values()
            ]
            products = torch.autograd.grad(
                list(self._gradients.values()), list(self.weights.values()), signs, retain_graph=True
            )
            for key, sign, product in zip(self.weights, signs, products, strict=True):
                sums[key] += float((sign * product).sum()) / sign.numel() / probes
        return Curvature(sums, self.seconds + time.process_time() - started, probes)
