"""Our shapes against the modules that transformers builds: the same parameters, in each layer and in all."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from strata_planner.contract.architectures import ROUTING
from strata_planner.question.model import Model
from tests.runtime.architectures import MODELS

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_layer": 6, "n_head": 4, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", [*MODELS, *SHAPES_ONLY])
def test_parameters_are_those_of_the_real_modules(name: str) -> None:
    model_type, fields = (MODELS | SHAPES_ONLY)[name]
    sizes = {"vocab_size": 96, "hidden_size": 32} if name in SHAPES_ONLY else SIZES
    config = CONFIG_MAPPING[model_type](**(sizes | fields))
    with torch.device("meta"):
        module = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    module.tie_weights()
    model = Model.from_config(config.to_dict(), for_serving=False)
    assert [layer.parameters for layer in model.layers] == [_count(layer) for layer in _layers(module)]
    assert model.parameters == _count(module)


@pytest.mark.parametrize("name", MODELS)
def test_linears_are_those_that_the_runtime_quantizes(name: str) -> None:
    """Every nn.Linear of a layer, and its fused experts one by one, so that bytes are counted in the format they get."""
    model_type, fields = MODELS[name]
    config = CONFIG_MAPPING[model_type](**(SIZES | fields))
    with torch.device("meta"):
        module = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model = Model.from_config(config.to_dict(), for_serving=False)
    for shape, layer in zip(model.layers, _layers(module), strict=True):
        real = {path: child for path, child in layer.named_modules() if type(child) is nn.Linear}
        fused = [tuple(each.shape[1:]) for each in layer.parameters() if each.ndim == 3 for _ in range(len(each))]
        plain = [tuple(each.weight.shape) for path, each in real.items() if not path.endswith(ROUTING)]
        ours = [
            (each.out_features, each.in_features)
            for each in shape.linears
            for _ in range(each.copies * each.quantizable)
        ]
        assert sorted(ours) == sorted(plain + fused)


def _layers(module: nn.Module) -> nn.ModuleList:
    return next(each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == 6)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
