"""What a text says of each weight of a model, for quantizers that weigh their errors: Fisher diagonals, and Hessians of the inputs from the same passes.

Called by `strata quantize` and by benchmarks. The diagonal of the empirical Fisher matrix is the mean over windows of the squared gradient of the
window's loss (SqueezeLLM, arXiv 2306.07629, section 4.1): the second-order cost of moving a weight, up to a factor that all weights share.

The gradients are those of the whole model, yet one layer is held at a time: forward through all layers, keeping the hidden states between them
(tokens x hidden size x layers), then backward from the head to the first layer, each layer computed once more. The Hessians listen to that.
With a folder for what is between layers, that is on disk and not in memory, and a run that was interrupted goes on at the layer where it stopped.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn import functional

from strata_runtime.allocator import freed_at_once
from strata_runtime.errors import InputError
from strata_runtime.tools.calibration.hessians import Recorder, recorded
from strata_runtime.tools.calibration.kept import KeptStates
from strata_runtime.tools.calibration.layers import LayeredModel, Piece

Diagonals = dict[str, Tensor]
Passed = Callable[[int, int], None]  # (layer, the work of that pass: a forward pass through the layer is 1)
CPU = torch.device("cpu")
FORWARD, BACKWARD = 1, 3  # computed once more, and a product for each gradient


@dataclass(frozen=True)
class LayerCalibration:
    """By path of a linear in the whole model: Fisher diagonals float32 [N, K], and Hessians float32 [K, K], the sum of x x^T over the inputs x that the
    16-bit model gives it; linears with the same inputs share one. Empty where nothing was asked for; no Hessian where no token came by.
    """

    layer: int
    fisher: Mapping[str, Tensor]
    hessians: Mapping[str, Tensor]


@dataclass(frozen=True)
class Wanted:
    """Of which layers (None: of all), and whether Hessians too."""

    layers: Collection[int] | None = None
    hessians: bool = True


def fisher_diagonals(
    folder: Path, windows: Sequence[Tensor], *, device: torch.device = CPU, layers: Collection[int] | None = None
) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    """(layer, its diagonals), as `calibrated_layers` gives them."""
    found = calibrated_layers(folder, windows, Wanted(layers, hessians=False), device=device)
    return ((each.layer, each.fisher) for each in found)


def calibrated_layers(
    folder: Path,
    windows: Sequence[Tensor],
    wanted: Wanted | None = None,
    *,
    device: torch.device = CPU,
    passed: Passed = lambda _layer, _work: None,
    kept: KeptStates | None = None,
) -> Iterator[LayerCalibration]:
    """The last layer first. `passed` is told of every pass through a layer, and of those that an earlier run has left in `kept`.

    windows: token ids [tokens] each. Held: the hidden states of all windows at every layer, in memory or in `kept`, and one layer with what is found of
    it. A layer is begun anew until the one after it is asked for. Raises what loading a stage raises.
    """
    wanted = wanted or Wanted()
    model = LayeredModel(folder, torch.float32, device)
    layers = set(range(model.num_layers) if wanted.layers is None else wanted.layers)
    if not layers:
        return
    with freed_at_once():
        passes = _Passes(model, windows, passed, kept or KeptStates(), device)
        top = passes.begun(layers)
        for index in range(top, min(layers) - 1, -1):
            states, gradients = passes.before(index), passes.after(index)
            layer = model.layer(index)
            linears = layer.keyed_linears if index in layers else {}
            with recorded(linears if wanted.hessians else {}) as recorder:
                found, gradients = _through(layer, linears, states, gradients, recorder)
            del layer, linears, states  # not held while the caller quantizes
            passes.through(index, gradients)
            del gradients
            if index in layers:
                yield LayerCalibration(index, found, _by_linear(recorder))
            del found, recorder  # before the next layer's are there
            passes.over(index)


class _Passes:
    """What lies between layers: `states-i` enters layer i, `gradients-i` is the loss's by what enters it. The last `i` is the head."""

    def __init__(
        self, model: LayeredModel, windows: Sequence[Tensor], passed: Passed, kept: KeptStates, device: torch.device
    ) -> None:
        self._model = model
        self._windows = windows
        self._passed = passed
        self._kept = kept
        self._device = device

    def begun(self, layers: Collection[int]) -> int:
        """The layer at which the way back begins: the one before gradients that are kept, else the last, once all layers have been passed."""
        count, first = self._model.num_layers, min(layers)
        for index in range(max(layers) + 1, count + 1):
            if self._has("gradients", index) and all(self._has("states", each) for each in range(first, index)):
                for layer in range(count):
                    self._passed(layer, FORWARD)
                for layer in range(index, count):
                    self._passed(layer, BACKWARD)
                return index - 1
        states = self._forward(first)
        gradients = _of_the_loss(self._model.head(), states, self._windows)
        self._kept.put(_name("gradients", count), gradients)
        self._kept.drop(_name("states", count))
        return count - 1

    def before(self, layer: int) -> list[Tensor]:
        return self._get("states", layer)

    def after(self, layer: int) -> list[Tensor]:
        return self._get("gradients", layer + 1)

    def through(self, layer: int, gradients: list[Tensor]) -> None:
        self._kept.put(_name("gradients", layer), gradients)
        self._passed(layer, BACKWARD)

    def over(self, layer: int) -> None:
        """Nothing of this layer is wanted any more."""
        self._kept.drop(_name("states", layer), _name("gradients", layer + 1))

    def _forward(self, first: int) -> list[Tensor]:
        """What enters the head. Of the layers from `first` on, what enters each is kept."""
        count = self._model.num_layers
        begin, states = self._farthest(first)
        for index in range(count):
            if index >= begin:
                states = self._model.layer(index).run(states)
                self._kept.put(_name("states", index + 1), states)
                if index < first:
                    self._kept.drop(_name("states", index))
            self._passed(index, FORWARD)
        return states

    def _farthest(self, first: int) -> tuple[int, list[Tensor]]:
        for index in range(self._model.num_layers, 0, -1):
            if all(self._has("states", each) for each in {*range(first, index), index}):
                found = self._kept.get(_name("states", index), self._device)
                if found is not None:
                    return index, found
        states = self._model.embedding().run(self._windows)
        self._kept.put(_name("states", 0), states)
        return 0, states

    def _has(self, what: str, index: int) -> bool:
        return self._kept.has(_name(what, index))

    def _get(self, what: str, index: int) -> list[Tensor]:
        found = self._kept.get(_name(what, index), self._device)
        if found is None:
            self._kept.clear()
            raise InputError(
                "what was kept of the calibration's passes is damaged and has been removed: run the same again"
            )
        return found


def _name(what: str, index: int) -> str:
    return f"{what}-{index:05d}"


def _of_the_loss(head: Piece, states: Sequence[Tensor], windows: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of each window's mean loss by what enters the head."""
    gradients: list[Tensor] = []
    for state, window in zip(states, windows, strict=True):
        inputs = state.clone().requires_grad_()
        logits = head.differentiable(inputs)
        loss = functional.cross_entropy(logits[:-1], window[1:].to(logits.device))
        gradients += torch.autograd.grad(loss, inputs)
    return gradients


def _through(
    layer: Piece,
    linears: Mapping[str, nn.Linear],
    states: Sequence[Tensor],
    gradients: Sequence[Tensor],
    recorder: Recorder,
) -> tuple[Diagonals, list[Tensor]]:
    """The diagonals of these linears, and the gradients by what enters the layer, from those by what leaves it."""
    weights = {key: linear.weight.requires_grad_() for key, linear in linears.items()}
    sums = {key: torch.zeros_like(weight, dtype=torch.float32) for key, weight in weights.items()}
    before = []
    for state, gradient in zip(states, gradients, strict=True):
        recorder.rows = len(state)
        inputs = state.clone().requires_grad_()
        with allow_mutation_on_saved_tensors():  # soft-capped scores are computed in place
            output = layer.differentiable(inputs)
            own, *found = torch.autograd.grad(output, (inputs, *weights.values()), gradient, allow_unused=True)
        before.append(own)
        for total, each in zip(sums.values(), found, strict=True):
            if each is not None:  # an expert that no token of the window was sent to
                total.add_(each.float().square_(), alpha=1 / len(states))
    return sums, before


def _by_linear(recorder: Recorder) -> dict[str, Tensor]:
    seen = (group for group in recorder.groups if bool(group.hessian.diagonal().any()))
    return {key: group.hessian for group in seen for key in group.linears}
