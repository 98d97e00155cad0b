"""Laws of experts that are quantized while they load: each is what a linear of its own would be, in its arithmetic and in its bytes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from strata_planner.contract.architectures import SUPPORTED
from strata_planner.contract.formats import WITHOUT_EXPERTS, ComputeType, FormatName
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES, MAKERS, QuantLinear, make_linear, stored_bytes_of
from strata_runtime.formats.expert_stack import ExpertProjection
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.padding import padded
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.gptq_models import make_plain_model
from tests.runtime.loading.stages import load, roles
from tests.runtime.loading.test_float8 import DENSE, LAYERS, logits

torch.set_num_threads(1)
EXPERTS = sorted(name for name, architecture in SUPPORTED.items() if architecture.fused_experts)
FORMATS: list[FormatName] = [name for name in MAKERS if name not in WITHOUT_EXPERTS and name != "dense"]
WEIGHTS_ALONE: list[FormatName] = ["int8", "int4", "int3", "fp8_e4m3"]
Projections = Iterator[tuple[str, ExpertProjection]]


def projections(stage: StageModel, layer: int) -> Projections:
    for name, module in stage.layers[layer].named_modules():
        if isinstance(module, ExpertProjection):
            yield name, module


def expert_weights(folder: Path, layer: int, name: str) -> torch.Tensor:
    """[experts, N, K] of one projection, from the checkpoint."""
    tensors = {key: each for key, each in load_file(folder / "model.safetensors").items() if f".layers.{layer}." in key}
    fused = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}[name]
    for key, tensor in tensors.items():
        if key.endswith(fused):
            return tensor
        if key.endswith(f"experts.{name}"):
            return tensor.mT.contiguous()
    parts = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}[name]
    return torch.stack(
        [
            torch.cat(
                [
                    next(tensors[key] for key in tensors for way in part if f".experts.{expert}.{way}.weight" in key)
                    for part in parts
                ]
            )
            for expert in range(4)
        ]
    )


def dequantized(folder: Path, stage: StageModel) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors as the stage holds them, float32."""
    weights = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        for key, linear in stage.linears(layer).items():
            if isinstance(linear, QuantLinear):
                weights[f"{key}.weight"] = linear.dequantized()
        for path, projection in projections(stage, layer):
            name = path.rpartition(".")[2]
            stored = torch.stack([projection.dequantized(expert) for expert in range(projection.count)])
            for key in [key for key in weights if f".layers.{layer}." in key]:
                weights[key] = _in_place_of(key, weights[key], name, stored)
    return weights


def _in_place_of(key: str, tensor: torch.Tensor, name: str, stored: torch.Tensor) -> torch.Tensor:
    if key.endswith("input_linear.weight" if name == "gate_up_proj" else "output_linear.weight"):
        return stored
    if key.endswith(f"experts.{name}"):
        return stored.mT.contiguous()
    if not re.search(r"\.experts\.\d+\.", key):
        return tensor
    expert, _, way = key.partition(".experts.")[2].partition(".")
    gate, up = stored[int(expert)].chunk(2)
    ways = {"gate_proj": gate, "w1": gate, "up_proj": up, "w3": up} if name == "gate_up_proj" else {}
    ways |= {"down_proj": stored[int(expert)], "w2": stored[int(expert)]} if name == "down_proj" else {}
    return ways.get(way.removesuffix(".weight"), tensor)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", swept(EXPERTS, ["qwen2_moe"]))
def test_an_expert_is_stored_as_a_linear_of_its_own(name: str, format_name: FormatName, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    stage = load(roles(model, 1, formats=(format_name,) * LAYERS)[0], model)
    found = list(projections(stage, 1))
    assert len(found) == 2
    for path, projection in found:
        for expert, weight in enumerate(expert_weights(model, 1, path.rpartition(".")[2])):
            alone = make_linear(weight, None, format_name, torch.float32)
            assert isinstance(alone, QuantLinear)
            assert torch.equal(projection.dequantized(expert), alone.dequantized())
            rows = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(expert))
            assert torch.equal(projection.multiply(expert, padded(rows)), alone(padded(rows)))


@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", swept(EXPERTS, ["qwen2_moe", "granitemoe"]))
def test_layers_take_the_bytes_that_the_planner_counts(name: str, compute_type: ComputeType, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    formats: tuple[FormatName, ...] = ("int8", "int4", "int3", "w8a8", "fp8_e4m3", "fp8_a8")
    stage = load(roles(model, 1, formats=formats, compute_type=compute_type)[0], model)
    shapes = Model.from_folder(model).layers
    counted = [layer_weights_bytes(*each, compute_type) for each in zip(shapes, formats, strict=True)]
    dtype = COMPUTE_DTYPES[compute_type]
    blocked = [
        2 * each.in_features * each.out_features for each in _blocked(stage)
    ]  # the shared expert's gate in bfloat16, which is no buffer
    assert sum(stored_bytes_of(layer) for layer in stage.layers) + sum(blocked) == sum(counted)
    assert dtype is stage.dtype


def _blocked(stage: StageModel) -> Iterator[BlockedLinear]:
    return (each for layer in stage.layers for each in layer.modules() if isinstance(each, BlockedLinear))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_an_expert_that_is_not_whole_is_named(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    tensors = load_file(model / "model.safetensors")
    part = next(key for key in tensors if ".layers.3." in key and ".experts.2.w3" in key.replace("up_proj", "w3"))
    del tensors[part]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks tensors of expert 2 of model\.layers\.3\.mlp\.experts\.gate_up_proj"):
        load(roles(model, 1, formats=("int4",) * LAYERS)[0], model)


def test_nan_in_an_expert_is_refused_with_its_number(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "olmoe")
    tensors = load_file(model / "model.safetensors")
    next(each for key, each in tensors.items() if ".layers.0.mlp.experts.1.down_proj" in key)[0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"expert 1 of model\.layers\.0\.mlp\.experts\.down_proj: 1 of \d+ values"):
        load(roles(model, 1, formats=("int8",) * LAYERS)[0], model)


@pytest.mark.parametrize("format_name", swept(WEIGHTS_ALONE, ["int4"]))
@pytest.mark.parametrize("name", swept(EXPERTS, ["qwen2_moe"]))
def test_a_stage_computes_what_a_plain_model_of_its_weights_does(
    name: str, format_name: FormatName, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "plain", name)
    formats = (format_name,) * LAYERS
    weights = dequantized(model, load(roles(model, 1, formats=formats)[0], model))
    changed = sum(not torch.equal(weights[key], each) for key, each in load_file(model / "model.safetensors").items())
    assert changed >= LAYERS * 6
    wanted = logits(make_plain_model(model, tmp_path / "same", weights), DENSE)
    torch.testing.assert_close(logits(model, formats), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-5)
