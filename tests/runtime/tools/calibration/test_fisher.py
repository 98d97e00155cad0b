"""Fisher diagonals, taken a layer at a time, are those of the whole model."""

import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from strata_runtime.tools.calibration.fisher import BACKWARD, FORWARD, Wanted, calibrated_layers, fisher_diagonals
from strata_runtime.tools.calibration.hessians import input_hessians
from strata_runtime.tools.calibration.layers import LayeredModel
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model

torch.set_num_threads(1)
# Windows, soft caps, another attention and norm, experts, biases, a parallel layer: what gradients may stumble on.
MODELS = swept(
    ("llama", "gemma2", "opt", "qwen2_moe", "phi3", "stablelm-parallel", "lfm2", "qwen3_5_text"),
    ("qwen2_moe",),
)
WINDOWS = [torch.arange(3, 27), torch.arange(60, 18, -3)]


def of_the_whole(folder: Path, keys: set[str]) -> dict[str, torch.Tensor]:
    """By transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    weights = {key: model.get_submodule(key).weight for key in keys}
    found = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    for window in WINDOWS:
        loss = torch.nn.functional.cross_entropy(model(input_ids=window[None]).logits[0, :-1].float(), window[1:])
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for key, gradient in zip(weights, gradients, strict=True):
            found[key] += 0 if gradient is None else gradient.square() / len(WINDOWS)
    return found


@pytest.mark.slow  # its moments are compared below
@pytest.mark.parametrize("name", MODELS)
def test_layer_by_layer_is_the_whole(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path, name)
    found = dict(fisher_diagonals(folder, WINDOWS))
    assert list(found) == list(range(len(found) - 1, -1, -1))
    merged = {key: diagonal for layer in found.values() for key, diagonal in layer.items()}
    expected = of_the_whole(folder, set(merged))
    for key, diagonal in merged.items():
        scale = float(expected[key].max())
        torch.testing.assert_close(diagonal, expected[key].detach(), rtol=1e-2, atol=1e-4 * scale + 1e-20)


@pytest.mark.parametrize("name", swept(("gemma2", "opt", "qwen2_moe"), ["opt"]))
def test_hessians_of_the_same_passes_are_those_of_forward_passes(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path, name)
    found = {each.layer: each for each in calibrated_layers(folder, WINDOWS)}
    model = LayeredModel(folder, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        states = model.embedding().run(WINDOWS)
        for index in range(model.num_layers):
            layer = model.layer(index)
            keys = {linear: key for key, linear in layer.keyed_linears.items()}
            for shared in input_hessians(layer, states):
                for path in shared.linears:
                    ours = found[index].hessians[keys[layer.linears[path]]]
                    torch.testing.assert_close(ours, shared.hessian, rtol=1e-3, atol=1e-4 * float(ours.abs().max()))
            states = layer.run(states)
            assert set(found[index].hessians) <= set(found[index].fisher) == set(keys.values())


def test_linears_with_the_same_inputs_share_a_hessian_and_every_pass_is_told(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    passes: list[tuple[int, int]] = []
    (found,) = calibrated_layers(folder, WINDOWS, Wanted([4]), passed=lambda *each: passes.append(each))
    assert len(found.hessians) == 7
    assert len({id(each) for each in found.hessians.values()}) == 4
    assert passes == [*((layer, FORWARD) for layer in range(6)), (5, BACKWARD), (4, BACKWARD)]


def test_one_layer_is_held_at_a_time(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    seen: list[weakref.ref[torch.Tensor]] = []
    held: list[bool] = []

    def passed(_layer: int, work: int) -> None:
        held.extend(ref() is not None for ref in seen if work == BACKWARD)

    for each in calibrated_layers(folder, WINDOWS, passed=passed):
        seen += [weakref.ref(found) for found in (*each.fisher.values(), *each.hessians.values())]
        del each
    assert held
    assert not any(held)


@pytest.mark.slow  # the tests around it have all layers and one at a time
def test_only_the_layers_asked_for_are_given(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    whole, some = dict(fisher_diagonals(folder, WINDOWS)), dict(fisher_diagonals(folder, WINDOWS, layers=[2, 4]))
    assert list(some) == [4, 2]
    assert all(torch.equal(diagonal, whole[index][key]) for index in some for key, diagonal in some[index].items())
    assert list(fisher_diagonals(folder, WINDOWS, layers=[])) == []


def test_what_matters_is_where_the_loss_moves(tmp_path: Path) -> None:
    """The same perturbation costs more on the weights of high diagonals than on those of low ones."""
    folder = make_tiny_model(tmp_path, "llama")
    diagonals = dict(fisher_diagonals(folder, WINDOWS))[5]
    assert set(diagonals) == {
        *(f"model.layers.5.self_attn.{each}_proj" for each in "qkvo"),
        *(f"model.layers.5.mlp.{each}_proj" for each in ("gate", "up", "down")),
    }
    key = "model.layers.5.mlp.down_proj"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight, middle = model.get_submodule(key).weight, diagonals[key].median()

    @torch.no_grad()
    def moved(chosen: torch.Tensor) -> float:
        """How far the logits of the first window go."""
        before = model(input_ids=WINDOWS[0][None]).logits
        weight.add_(chosen * 0.01)
        after = model(input_ids=WINDOWS[0][None]).logits
        weight.sub_(chosen * 0.01)
        return float((after.log_softmax(-1) - before.log_softmax(-1)).square().mean())

    assert moved(diagonals[key] > middle) > moved(diagonals[key] <= middle)
