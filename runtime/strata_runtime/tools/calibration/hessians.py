"""Hessians of a layer's linears: the sum of x x^T over what enters each, while calibration windows run through the layer.

Called by GPTQ's pass and by `fisher`, whose passes it listens to. Linears that are given the same tensor share one Hessian. GPTQ, arXiv 2210.17323, section 3.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from strata_runtime.tools.calibration.inputs import inputs_heard
from strata_runtime.tools.calibration.layers import Piece


@dataclass
class Shared:
    """Linears with the same inputs, by name, and their Hessian, float32 [K, K]."""

    linears: list[str]
    hessian: Tensor


@dataclass
class Recorder:
    """Sums up what linears are given. `rows`: of the window that runs, set before it does; what is beyond them pads the batch.

    `last`: what the linear before was given.
    """

    groups: list[Shared] = field(default_factory=list)
    rows: int = 0
    last: Tensor | None = None
    _group_of: dict[str, Shared] = field(default_factory=dict)

    def see(self, name: str, inputs: Tensor) -> None:
        if name not in self._group_of:
            if inputs is not self.last:
                empty = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1], dtype=torch.float32)
                self.groups.append(Shared([], empty))
            self.groups[-1].linears.append(name)
            self._group_of[name] = self.groups[-1]
        self.last = inputs
        group = self._group_of[name]
        if group.linears[0] == name:
            rows = inputs.detach().flatten(0, -2)[: self.rows].float()
            group.hessian.addmm_(rows.t(), rows)


@contextmanager
def recorded(linears: Mapping[str, nn.Linear]) -> Iterator[Recorder]:
    """While windows run, one after the other."""
    recorder = Recorder()
    try:
        with inputs_heard(linears, recorder.see):
            yield recorder
    finally:
        recorder.last = None  # it may hold a graph, and that the layer


def input_hessians(layer: Piece, windows: Sequence[Tensor]) -> list[Shared]:
    """By path in the layer, in the order in which it calls its linears. windows: hidden states [tokens, hidden] that enter the layer."""
    with recorded(layer.linears) as recorder:
        for window in windows:
            recorder.rows = len(window)
            layer.run([window])
    return recorder.groups
