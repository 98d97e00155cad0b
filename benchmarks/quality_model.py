"""A model whose linears take other weights, and its losses on windows that nothing was calibrated on, for `benchmarks.quality`.

Computed by transformers in float32, so that a difference is the weights' alone; formats that round activations too run as the runtime's own modules.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

Replacement = Tensor | nn.Module  # a weight [N, K], or a module to run in place of the linear


@dataclass(frozen=True)
class Losses:
    """Of each window: the sum of the negative log likelihoods of its tokens after the first, and how many they are."""

    sums: Tensor
    tokens: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.sums.sum() / self.tokens.sum()))

    def over(self, peer: "Losses") -> tuple[float, float]:
        """The ratio of perplexities and its standard error, over the same windows."""
        total, count = self.tokens.sum(), len(self.tokens)
        difference = (self.sums.sum() - peer.sums.sum()) / total
        rests = self.sums - peer.sums - difference * self.tokens
        error = (rests.square().sum() * count / max(1, count - 1)).sqrt() / total
        return math.exp(float(difference)), math.exp(float(difference)) * float(error)


class Measured:
    """`linears`: those of the decoder's layers, by path in the model; `layer_of`: the layer of each."""

    def __init__(self, folder: Path, windows: Sequence[Tensor]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        self._windows = torch.stack(list(windows))
        modules = dict(self._model.named_modules())
        layers = [
            path for path, module in modules.items() if path.endswith(".layers") and isinstance(module, nn.ModuleList)
        ]
        self.linears: dict[str, nn.Linear] = {
            path: module
            for path, module in modules.items()
            if path.startswith(f"{layers[0]}.") and type(module) is nn.Linear
        }
        self.layer_of = {path: int(path.removeprefix(f"{layers[0]}.").partition(".")[0]) for path in self.linears}
        self.num_layers = 1 + max(self.layer_of.values())

    @property
    def weights(self) -> dict[str, Tensor]:
        return {path: linear.weight.data for path, linear in self.linears.items()}

    def losses(self, replacements: Mapping[str, Replacement]) -> Losses:
        """With other weights or modules for these linears, for this call alone."""
        with torch.inference_mode(), self._replaced(replacements):
            sums = [self._sum(window) for window in self._windows]
        return Losses(
            torch.tensor(sums, dtype=torch.float64), torch.tensor([len(each) - 1.0 for each in self._windows])
        )

    def _sum(self, window: Tensor) -> float:
        logits = self._model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
        return float(nn.functional.cross_entropy(logits, window[1:], reduction="sum"))

    @contextmanager
    def _replaced(self, replacements: Mapping[str, Replacement]) -> Iterator[None]:
        dense = self.weights
        for path, replacement in replacements.items():
            if isinstance(replacement, nn.Module):
                self._model.set_submodule(path, replacement)
            else:
                self.linears[path].weight.data = replacement
        try:
            yield
        finally:
            for path in replacements:
                self._model.set_submodule(path, self.linears[path])
                self.linears[path].weight.data = dense[path]
