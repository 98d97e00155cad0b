"""What a text says of each weight of a model, for quantizers that weigh their errors: Fisher diagonals, and Hessians of the inputs from the same passes.

Called by `strata quantize` and by benchmarks. The diagonal of the empirical Fisher matrix is the mean over windows of the squared gradient of the
window's loss (SqueezeLLM, arXiv 2306.07629, section 4.1): the second-order cost of moving a weight, up to a factor that all weights share.

The gradients are those of the whole model, yet one layer is held at a time: forward through all layers, keeping the hidden states between them
(tokens x hidden size x layers), then backward from the head to the first layer, each layer computed once more. The Hessians listen to that.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn import functional

from strata_runtime.allocator import freed_at_once
from strata_runtime.tools.calibration.hessians import Recorder, recorded
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


def fisher_diagonals(
    folder: Path, windows: Sequence[Tensor], *, device: torch.device = CPU, layers: Collection[int] | None = None
) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    """(layer, its diagonals), as `calibrated_layers` gives them."""
    found = calibrated_layers(folder, windows, device=device, layers=layers, hessians=False)
    return ((each.layer, each.fisher) for each in found)


def calibrated_layers(
    folder: Path,
    windows: Sequence[Tensor],
    *,
    device: torch.device = CPU,
    layers: Collection[int] | None = None,
    hessians: bool = True,
    passed: Passed = lambda _layer, _work: None,
) -> Iterator[LayerCalibration]:
    """The last layer first; `layers` alone where they are named. `passed` is told of every pass through a layer.

    windows: token ids [tokens] each. Held: the hidden states of all windows at every layer, and one layer with what is found of it.
    Raises what loading a stage raises.
    """
    model = LayeredModel(folder, torch.float32, device)
    wanted = set(range(model.num_layers) if layers is None else layers)
    if not wanted:
        return
    with freed_at_once():
        states = [model.embedding().run(windows)]
        for index in range(model.num_layers):
            states.append(model.layer(index).run(states[-1]))
            passed(index, FORWARD)
        gradients = _of_the_loss(model.head(), states.pop(), windows)
        for index in range(model.num_layers - 1, min(wanted) - 1, -1):
            layer = model.layer(index)
            linears = layer.keyed_linears if index in wanted else {}
            with recorded(linears if hessians else {}) as recorder:
                found, gradients = _through(layer, linears, states.pop(), gradients, recorder)
            del layer, linears  # not held while the caller quantizes
            passed(index, BACKWARD)
            if index in wanted:
                yield LayerCalibration(index, found, _by_linear(recorder))
            del found, recorder  # before the next layer's are there


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
