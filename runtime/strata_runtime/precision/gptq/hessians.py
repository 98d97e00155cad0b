"""Hessians of a layer's linears: the sum of x x^T over what enters each, while calibration windows run through the layer.

Called by `calibrated`. Linears that are given the same tensor share one Hessian. GPTQ, arXiv 2210.17323, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from strata_runtime.calibration.layers import Piece


@dataclass
class Shared:
    """Linears with the same inputs, by their path in the layer, and their Hessian, float32 [K, K]."""

    linears: list[str]
    hessian: Tensor


@dataclass
class _Recorder:
    """The hooks of one run. `rows`: of the window that runs; what is beyond them pads the batch."""

    groups: list[Shared] = field(default_factory=list)
    rows: int = 0
    _group_of: dict[str, Shared] = field(default_factory=dict)
    _last: Tensor | None = None

    def see(self, name: str, inputs: Tensor) -> None:
        if name not in self._group_of:
            if inputs is not self._last:
                empty = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1], dtype=torch.float32)
                self.groups.append(Shared([], empty))
            self.groups[-1].linears.append(name)
            self._group_of[name] = self.groups[-1]
        self._last = inputs
        group = self._group_of[name]
        if group.linears[0] == name:
            rows = inputs.flatten(0, -2)[: self.rows].float()
            group.hessian.addmm_(rows.t(), rows)


def input_hessians(layer: Piece, windows: Sequence[Tensor]) -> list[Shared]:
    """In the order in which the layer calls its linears. windows: hidden states [tokens, hidden] that enter the layer."""
    recorder = _Recorder()

    def hook(name: str) -> object:
        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            recorder.see(name, inputs[0])

        return record

    handles = [linear.register_forward_pre_hook(hook(name)) for name, linear in layer.linears.items()]  # type: ignore[arg-type]
    try:
        for window in windows:
            recorder.rows = len(window)
            layer.run([window])
    finally:
        for handle in handles:
            handle.remove()
    return recorder.groups
