"""Our shapes against the modules that transformers builds: the same parameters, in each layer and in all."""

from typing import Any

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from strata_planner.contract.architectures import ROUTING
from strata_planner.question.model import Model
from tests.runtime.architectures import SWEEP, on_meta, tiny_config

# As published: what config.json leaves out is transformers' own.
SPARSE: dict[str, dict[str, Any]] = {
    "falcon-7b": {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "vocab_size": 65024,
        "multi_query": True,
    },
    "gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
}


@pytest.mark.parametrize("name", SWEEP)
def test_parameters_are_those_of_the_real_modules(name: str) -> None:
    model_type, fields = tiny_config(name)
    config = CONFIG_MAPPING[model_type](**fields)
    module = on_meta(config)
    module.tie_weights()
    model = Model.from_config(config.to_dict(), for_serving=False)
    assert [layer.parameters for layer in model.layers] == [_count(layer) for layer in _layers(module)]
    assert model.parameters == _count(module)


@pytest.mark.parametrize("name", SWEEP)
def test_linears_are_those_that_the_runtime_quantizes(name: str) -> None:
    """Every nn.Linear of a layer, and its fused experts one by one, so that bytes are counted in the format they get."""
    model_type, fields = tiny_config(name)
    config = CONFIG_MAPPING[model_type](**fields)
    module = on_meta(config)
    model = Model.from_config(config.to_dict(), for_serving=False)
    for shape, layer in zip(model.layers, _layers(module), strict=True):
        real = {path: child for path, child in layer.named_modules() if type(child) is nn.Linear}
        parameters = [
            each
            for module in layer.modules()
            if not isinstance(module, nn.Conv1d)
            for each in module.parameters(recurse=False)
        ]
        fused = [tuple(each.shape[1:]) for each in parameters if each.ndim == 3 for _ in range(len(each))]
        plain = [tuple(each.weight.shape) for path, each in real.items() if not path.endswith(ROUTING)]
        ours = [
            (each.out_features, each.in_features)
            for each in shape.linears
            for _ in range(each.copies * each.quantizable)
        ]
        assert sorted(ours) == sorted(plain + fused)


@pytest.mark.parametrize("config", SPARSE.values(), ids=SPARSE)
def test_what_a_config_leaves_out_is_as_transformers_has_it(config: dict[str, Any]) -> None:
    whole = CONFIG_MAPPING[config["model_type"]](
        **{name: value for name, value in config.items() if name != "model_type"}
    )
    assert Model.from_config(config) == Model.from_config(whole.to_dict())


def _layers(module: nn.Module) -> nn.ModuleList:
    return next(each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == 6)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
