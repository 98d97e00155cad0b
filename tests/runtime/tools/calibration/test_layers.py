"""A model one layer at a time computes what the whole computes, on every architecture."""

from pathlib import Path

import pytest
import torch

from strata_planner.contract.frames import Segment
from strata_runtime.tools.calibration.layers import LayeredModel
from tests.laws import swept
from tests.runtime.architectures import MODELS, REPRESENTATIVE, make_tiny_model
from tests.runtime.loading.stages import CPU, Stages, roles

torch.set_num_threads(1)
WINDOWS = [torch.tensor([1, 5, 9, 2, 7]), torch.tensor([1, 3, 3, 8, 40, 12, 6, 60, 11])]


@pytest.mark.parametrize("name", swept(MODELS, REPRESENTATIVE[1:2]))
def test_the_pieces_are_the_whole(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path, name)
    model = LayeredModel(folder, torch.float32, CPU)
    with torch.inference_mode():
        states = model.embedding().run(WINDOWS)
        for index in range(model.num_layers):
            states = model.layer(index).run(states)
        logits = model.head().run(states)
        whole = Stages(folder, roles(folder, 1))
        for place, (window, found) in enumerate(zip(WINDOWS, logits, strict=True)):
            expected = whole.step({place: window}, [Segment(place, 0, len(window), len(window))])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_other_weights_hold_for_a_while(tmp_path: Path) -> None:
    model = LayeredModel(make_tiny_model(tmp_path, "llama"), torch.float32, CPU)
    with torch.inference_mode():
        layer, states = model.layer(0), model.embedding().run(WINDOWS)
        before = layer.run(states)
        coarse = layer.quantized(3)
        assert (
            set(coarse)
            == set(layer.linears)
            == {
                *(f"self_attn.{each}_proj" for each in "qkvo"),
                *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
            }
        )
        with layer.with_weights(coarse):
            during = layer.run(states)
        after = layer.run(states)
    assert not torch.equal(during[0], before[0])
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
