"""Forwards of one native call: taken by the modules that compute what they do, and by no others."""

from functools import partial
from pathlib import Path

import pytest
import torch

from strata_planner.contract.frames import Segment
from strata_runtime.kernels import native_dense
from strata_runtime.model import fused_forwards
from strata_runtime.model.same_code import is_the_same
from tests.laws import swept
from tests.runtime.architectures import ARCHITECTURES, make_tiny_model
from tests.runtime.loading.stages import Stages, roles

pytestmark = pytest.mark.skipif(not native_dense.runs(), reason="this processor has no such kernels")
FUSED = {  # kinds of modules
    "llama": {"LlamaRMSNorm", "LlamaAttention", "LlamaMLP", "LlamaDecoderLayer"},
    "mistral": {"MistralRMSNorm", "MistralAttention", "MistralMLP", "MistralDecoderLayer"},
    "qwen2": {"Qwen2RMSNorm", "Qwen2Attention", "Qwen2MLP", "Qwen2DecoderLayer"},
    "qwen3": {"Qwen3RMSNorm", "Qwen3Attention", "Qwen3MLP", "Qwen3DecoderLayer"},
    "gemma": {"GemmaAttention"},  # its norms add one to their weights
    "opt": set(),
}


def logits(stages: Stages, texts: dict[int, torch.Tensor]) -> torch.Tensor:
    stages.step(texts, [Segment(1, 0, 9, 0), Segment(2, 0, 4, 0)])
    return stages.step(texts, [Segment(1, 9, 5, 5), Segment(2, 4, 1, 1)])


@pytest.mark.parametrize("name", swept([name for name in FUSED if name in ARCHITECTURES], ["gemma", "opt", "qwen3"]))
def test_what_is_fused_and_that_it_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes_layers = any(each.endswith("DecoderLayer") for each in FUSED[name])
    model = make_tiny_model(tmp_path, name, **({"head_dim": 32} if takes_layers else {}))  # as the library takes heads
    texts = {number: torch.arange(14) * (5 + number) % 90 for number in (1, 2)}
    stages = Stages(model, roles(model, 2, compute_type="bfloat16"))
    modules = [module for stage in stages.models for layer in stage.layers for module in layer.modules()]
    fused = {type(each).__name__ for each in modules if isinstance(vars(each).get("forward"), partial)}
    assert fused == FUSED[name]
    found = logits(stages, texts)
    monkeypatch.setattr(fused_forwards, "_FORWARDS", ())
    expected = logits(Stages(model, roles(model, 2, compute_type="bfloat16")), texts)
    assert (found - expected).abs().max() <= 0.04 * expected.abs().max()


def test_a_layer_with_heads_that_the_library_does_not_take_is_not_fused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "qwen3", head_dim=8)
    stages = Stages(model, roles(model, 1, compute_type="bfloat16"))
    assert not any("forward" in vars(layer) for layer in stages.models[0].layers)


def test_functions_are_told_apart_by_what_they_do() -> None:
    def one(rows: int) -> int:
        """Some words."""
        return rows + 1

    def same(rows: int) -> int:
        """Other words."""
        return rows + 1

    def other(rows: int) -> int:
        return rows + 2

    assert is_the_same(one, same)
    assert not is_the_same(one, other)
    assert not is_the_same(None, one)
