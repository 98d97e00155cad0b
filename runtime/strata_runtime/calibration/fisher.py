"""Fisher diagonals: how much each weight matters to the loss, for quantizers that weigh their errors.

Called by `strata quantize` and by benchmarks. The diagonal of the empirical Fisher matrix is the mean over windows of the squared gradient of the
window's loss (SqueezeLLM, arXiv 2306.07629, section 4.1): the second-order cost of moving a weight, up to a factor that all weights share.

The gradients are those of the whole model, yet one layer is held at a time: forward through all layers, keeping the hidden states between them
(tokens x hidden size x layers), then backward from the head to the first layer, each layer computed once more.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn import functional

from strata_runtime.allocator import freed_at_once
from strata_runtime.calibration.layers import LayeredModel, Piece

Diagonals = dict[str, Tensor]
CPU = torch.device("cpu")


def fisher_diagonals(
    folder: Path,
    windows: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    layers: Collection[int] | None = None,
) -> Iterator[tuple[int, Diagonals]]:
    """(layer, path of a linear in the whole model -> float32 [N, K]), the last layer first; of `layers` alone where they are named.

    windows: token ids [tokens] each. Held: the hidden states of all windows at every layer, and one layer with its diagonals.
    Raises what loading a stage raises.
    """
    model = LayeredModel(folder, dtype, device)
    wanted = set(range(model.num_layers) if layers is None else layers)
    if not wanted:
        return
    with freed_at_once():
        states = [model.embedding().run(windows)]
        for index in range(model.num_layers):
            states.append(model.layer(index).run(states[-1]))
        gradients = _of_the_loss(model.head(), states.pop(), windows)
        for index in range(model.num_layers - 1, min(wanted) - 1, -1):
            found, gradients = _through(model.layer(index), states.pop(), gradients, keep=index in wanted)
            if index in wanted:
                yield index, found


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
    layer: Piece, states: Sequence[Tensor], gradients: Sequence[Tensor], *, keep: bool
) -> tuple[Diagonals, list[Tensor]]:
    """The layer's diagonals (none unless `keep`), and the gradients by what enters it, from those by what leaves it."""
    linears = layer.keyed_linears if keep else {}
    weights = {key: linear.weight.requires_grad_() for key, linear in linears.items()}
    sums = {key: torch.zeros_like(weight, dtype=torch.float32) for key, weight in weights.items()}
    before = []
    for state, gradient in zip(states, gradients, strict=True):
        inputs = state.clone().requires_grad_()
        with allow_mutation_on_saved_tensors():  # soft-capped scores are computed in place
            output = layer.differentiable(inputs)
            own, *found = torch.autograd.grad(output, (inputs, *weights.values()), gradient, allow_unused=True)
        before.append(own)
        for total, each in zip(sums.values(), found, strict=True):
            if each is not None:  # an expert that no token of the window was sent to
                total.add_(each.float().square_(), alpha=1 / len(states))
    return sums, before
