"""The pass: every layer is loaded once, seen by the calibration windows and by those held back, and freed.

Called by `__main__` and by benchmarks. At any time one layer is held twice (its own weights and those of one precision)
beside the hidden states of all windows: tokens x hidden size, for the held-back ones once per assignment of bits.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from strata_planner.contract.architectures import check_without_experts
from strata_planner.contract.calibration import CALIBRATION_VERSION, Calibration, LayerStatistics, fingerprint
from strata_runtime.allocator import freed_at_once
from strata_runtime.tools.calibration.layers import LayeredModel, Piece
from strata_runtime.tools.calibration.losses import Branches, assignments
from strata_runtime.tools.calibration.statistics import deviations, input_moments, layer_statistics
from strata_runtime.tools.calibration.text import Windows

BITS = (3, 4, 8)
CPU = torch.device("cpu")
DEVIATION_TOKENS = 2048  # of the calibration tokens: the share of an energy needs fewer than a mean does


@dataclass(frozen=True)
class Subject:
    """What is calibrated, in which arithmetic. `text`: the name under which the text is recorded."""

    folder: Path
    text: str
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU


def calibrate(subject: Subject, windows: Windows, progress: Callable[[int, int], None]) -> Calibration:
    """`progress(done, total)` is called after each layer. Raises InputError and UnsupportedModelError as loading does."""
    config = json.loads((subject.folder / "config.json").read_text(encoding="utf-8"))
    check_without_experts(config, "calibration")
    with torch.inference_mode(), freed_at_once():
        model = LayeredModel(subject.folder, subject.dtype, subject.device)
        embedding = model.embedding()
        states = embedding.run(windows.calibration)
        held_back = embedding.run(windows.held_back) if windows.held_back else []
        del embedding
        branches = Branches(assignments(model.num_layers, BITS) if held_back else [], held_back, model.num_layers)
        layers = []
        for index in range(model.num_layers):
            statistics, states = _one_layer(model.layer(index), states, branches)
            layers.append(statistics)
            progress(index + 1, model.num_layers)
        loss, measured = branches.losses(model.head(), windows.held_back) if held_back else (None, ())
    return Calibration(
        version=CALIBRATION_VERSION,
        fingerprint=fingerprint(config),
        text=subject.text,
        tokens=sum(len(window) for window in windows.calibration),
        layers=tuple(layers),
        held_back_tokens=sum(len(window) for window in windows.held_back),
        loss=loss,
        measured=measured,
    )


def _one_layer(
    layer: Piece, states: list[torch.Tensor], branches: Branches
) -> tuple[LayerStatistics, list[torch.Tensor]]:
    """The layer's statistics, and its outputs for the calibration windows."""
    with input_moments(layer.linears, max(len(state) for state in states)) as moments:
        outputs = layer.run(states)
    branches.pass_layer(layer, 16)
    few = max(1, DEVIATION_TOKENS // len(states[0]))
    deviation = {}
    for bits in BITS:
        weights = layer.quantized(bits)
        deviation[bits] = deviations(layer, weights, states[:few], outputs[:few])
        with layer.with_weights(weights):
            branches.pass_layer(layer, bits)
    branches.layer_done()
    return layer_statistics(layer.linears, moments, deviation), outputs
