"""Losses of mixed precisions: the assignments that are tried, and the branches that share what is alike."""

from pathlib import Path

import pytest
import torch

from strata_runtime.tools.calibration.layers import LayeredModel
from strata_runtime.tools.calibration.losses import Branches, assignments, window_loss
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.stages import CPU

torch.set_num_threads(1)
WINDOWS = [torch.tensor([1, 5, 9, 2, 7, 30]), torch.tensor([1, 3, 3, 8, 40, 12])]


@pytest.mark.parametrize("layers", [1, 2, 7, 80])
def test_a_handful_of_different_assignments(layers: int) -> None:
    found = assignments(layers, (3, 4, 8))
    assert found == assignments(layers, (3, 4, 8))
    assert len(set(found)) == len(found) <= 12
    assert {(bits,) * layers for bits in (3, 4, 8)} <= set(found)
    assert (16,) * layers not in found
    assert all(len(each) == layers for each in found)


def test_branches_are_what_each_assignment_gives_alone(tmp_path: Path) -> None:
    model = LayeredModel(make_tiny_model(tmp_path, "llama", num_hidden_layers=3), torch.float32, CPU)
    assigned = [(3, 3, 3), (3, 16, 4), (16, 16, 4), (16, 4, 16)]
    with torch.inference_mode():
        embedded, head = model.embedding().run(WINDOWS), model.head()
        branches = Branches(assigned, embedded, 3)
        for index in range(3):
            layer = model.layer(index)
            for bits in (16, 3, 4):
                with layer.with_weights({} if bits == 16 else layer.quantized(bits)):
                    branches.pass_layer(layer, bits)
            branches.layer_done()
        loss, measured = branches.losses(head, WINDOWS)
        assert loss == pytest.approx(alone(model, (16, 16, 16), embedded))
        for bits, each in zip(assigned, measured, strict=True):
            expected = alone(model, bits, embedded)
            assert (each.bits, each.loss) == (bits, pytest.approx(expected))
            assert each.increase == pytest.approx(expected - loss, abs=1e-6)
            assert each.error > 0


def alone(model: LayeredModel, bits: tuple[int, ...], states: list[torch.Tensor]) -> float:
    for index, each in enumerate(bits):
        layer = model.layer(index)
        with layer.with_weights({} if each == 16 else layer.quantized(each)):
            states = layer.run(states)
    head = model.head()
    total = sum(window_loss(head, *pair) for pair in zip(states, WINDOWS, strict=True))
    return total / sum(len(window) - 1 for window in WINDOWS)
