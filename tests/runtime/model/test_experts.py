"""Experts one after the other: transformers' own result, over few numbers of rows, whatever shares the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from strata_runtime.model.experts import EXPERTS, use_padded_experts
from tests.runtime.architectures import make_tiny_model

TOKENS = (1, 5, 130, 700)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(Path(tmp_path_factory.mktemp("experts")), "mixtral")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, model.model.layers[0].mlp.experts


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, 4, generator=generator).topk(2)
    return torch.randn(tokens, 32, generator=generator), scores.indices, scores.values


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_sum_is_that_of_the_grouped_product(layer: Any, tokens: int) -> None:
    model, experts = layer
    given = routed(tokens)
    with torch.inference_mode():
        model.set_experts_implementation("grouped_mm")
        expected = experts(*given)
        use_padded_experts(model)
        assert model.config._experts_implementation == EXPERTS
        torch.testing.assert_close(experts(*given), expected)


def test_few_numbers_of_rows_are_multiplied(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, experts = layer
    use_padded_experts(model)
    rows: set[int] = set()
    linear = functional.linear

    def counted(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.add(inputs.shape[0])
        return linear(inputs, weight, bias)

    monkeypatch.setattr(functional, "linear", counted)
    with torch.inference_mode():
        for tokens in range(1, 400, 7):
            experts(*routed(tokens))
    assert rows <= {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128}


def test_a_token_does_not_depend_on_what_else_is_in_the_batch(layer: Any) -> None:
    model, experts = layer
    use_padded_experts(model)
    hidden, index, weights = routed(64)
    with torch.inference_mode():
        whole = experts(hidden, index, weights)
        torch.testing.assert_close(experts(hidden[:3], index[:3], weights[:3]), whole[:3])
