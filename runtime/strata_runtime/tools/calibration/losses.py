"""Losses of a model with mixed precisions, measured while its layers stream by.

Called by `calibrate`. Assignments of bits to layers that begin alike share their computation up to where they part.
"""

import math
import random
from collections.abc import Sequence

import torch

from strata_planner.contract.calibration import MeasuredLoss
from strata_runtime.tools.calibration.layers import Piece

Bits = tuple[int, ...]
_SEED = 0
_MIXTURES = 3


def assignments(num_layers: int, bits: Sequence[int]) -> list[Bits]:
    """A handful of ways to give `bits` (below 16) to the layers: uniform, one half of the layers, and random mixtures."""
    low = sorted(set(bits) - {16})
    half = num_layers // 2
    chosen = [(each,) * num_layers for each in low]
    for each in low[:2]:
        chosen += [
            (each,) * half + (16,) * (num_layers - half),
            (16,) * half + (each,) * (num_layers - half),
        ]
    draw = random.Random(_SEED)
    chosen += [tuple(draw.choice([*low, 16]) for _ in range(num_layers)) for _ in range(_MIXTURES)]
    dense = (16,) * num_layers
    return [each for each in dict.fromkeys(chosen) if each != dense]


class Branches:
    """Hidden states of the held-back windows under every assignment, one entry for those that are alike so far."""

    def __init__(self, assigned: Sequence[Bits], states: list[torch.Tensor], num_layers: int) -> None:
        """`states`: the embedded windows. The model at 16 bits is always among the branches."""
        self._assigned = [(16,) * num_layers, *assigned]
        self._states: dict[Bits, list[torch.Tensor]] = {(): states}
        self._next: dict[Bits, list[torch.Tensor]] = {}

    def pass_layer(self, layer: Piece, bits: int) -> None:
        """Advance the branches whose next layer is at `bits`; the layer computes with weights of that precision."""
        for prefix, states in self._states.items():
            after = (*prefix, bits)
            if any(each[: len(after)] == after for each in self._assigned):
                self._next[after] = layer.run(states)

    def layer_done(self) -> None:
        """Every precision of this layer has been passed."""
        self._states, self._next = self._next, {}

    def losses(self, head: Piece, windows: Sequence[torch.Tensor]) -> tuple[float, tuple[MeasuredLoss, ...]]:
        """The mean loss per token at 16 bits, and each assignment's."""
        sums = {
            bits: [window_loss(head, *pair) for pair in zip(states, windows, strict=True)]
            for bits, states in self._states.items()
        }
        tokens = [len(window) - 1 for window in windows]
        dense = sums[self._assigned[0]]
        measured = tuple(_measured(each, sums[each], dense, tokens) for each in self._assigned[1:])
        return sum(dense) / sum(tokens), measured


def window_loss(head: Piece, state: torch.Tensor, window: torch.Tensor) -> float:
    """Sum of the negative log likelihoods of a window's tokens after the first. state: [tokens, hidden]."""
    logits = head.run([state])[0]
    total = torch.nn.functional.cross_entropy(logits[:-1], window[1:].to(logits.device), reduction="sum")
    return float(total)


def _measured(bits: Bits, sums: Sequence[float], dense: Sequence[float], tokens: Sequence[int]) -> MeasuredLoss:
    """The error is that of a ratio of sums over independent windows."""
    total, count = sum(tokens), len(tokens)
    increase = (sum(sums) - sum(dense)) / total
    rests = [own - base - increase * size for own, base, size in zip(sums, dense, tokens, strict=True)]
    spread = sum(rest * rest for rest in rests)
    error = math.sqrt(spread * count / max(1, count - 1)) / total
    return MeasuredLoss(bits=bits, loss=sum(sums) / total, increase=increase, error=error)
