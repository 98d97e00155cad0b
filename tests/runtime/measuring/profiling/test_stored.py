"""Shallow models in every format: they load and run as slots' do, with the kernels that slots would take, and say how GPTQ layers lie."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strata_planner.contract.formats import ANY_PRECISION, FORMAT_NAMES, GPTQ, STORED_FORMATS, FormatName, stored_bytes
from strata_planner.contract.model_folder import ACTIVATIONS_FILE, ANY_PRECISION_FOLDER
from strata_planner.contract.quantization import ModuleQuantization
from strata_planner.costs.fitted import FittedLatency
from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.formats import QuantLinear, stored_bytes_of
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.stage import ProfiledStage, StageSpec
from strata_runtime.measuring.profiling.stored import ShallowModels, make_models
from tests.planner.latency_profiles import a_latency_profile
from tests.runtime.measuring.profiling.shapes import FIELDS, WORKS

CPU = torch.device("cpu")
PLAIN = tuple(name for name in FORMAT_NAMES if name not in STORED_FORMATS)
DESCRIPTION = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "dynamic": {
        r"-:.*\.1\.self_attn\.o_proj": {},
        r"+:.*\.(2|3)\.": {"bits": 8, "group_size": 16, "desc_act": False, "sym": False},
    },
}
QUANTIZED: dict[str, Any] = FIELDS | {"quantization_config": DESCRIPTION}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ShallowModels:
    return make_models(QUANTIZED, 2, tmp_path_factory.mktemp("models"), (*PLAIN, "gptq4", "gptq8"))


def linears_of(stage: ProfiledStage) -> list[QuantLinear]:
    return [each for each in stage.model.layers[0].modules() if isinstance(each, QuantLinear)]


@pytest.mark.parametrize("name", [*PLAIN, "gptq4", "gptq8"])
def test_a_stage_of_every_format_runs_and_names_its_kernel(name: FormatName, models: ShallowModels) -> None:
    stage = ProfiledStage(models.folder(name), StageSpec((name,), "bfloat16", 1024, 256), CPU)
    for work in WORKS[:3]:
        stage.prepare(work)
        assert stage.run(work).layer > 0
    linears = linears_of(stage)
    assert {each.format for each in linears} == ({name} if name != "dense" else set())
    for each in linears:
        if name not in GPTQ.values():
            expected = stored_bytes(name, each.out_features, each.in_features, "bfloat16")
            assert stored_bytes_of(each) == expected
    family = "gptq" if name in GPTQ.values() else name
    assert all(kernel.startswith(family) for rows in (1, 200) for kernel in stage.kernels(rows).split("+"))


def test_any_precision_is_read_from_a_copy_and_not_made(models: ShallowModels) -> None:
    assert (models.plain / ANY_PRECISION_FOLDER / "manifest.json").is_file()
    few, many = (
        linears_of(ProfiledStage(models.plain, StageSpec((name,), "bfloat16", 64, 64), CPU))[0]
        for name in (ANY_PRECISION[3], ANY_PRECISION[8])
    )
    assert torch.equal(few.get_buffer("plane_0"), many.get_buffer("plane_0"))


def test_what_no_format_needs_is_not_made(tmp_path: Path) -> None:
    models = make_models(FIELDS, 2, tmp_path, ("dense", "int8"))
    assert not (models.plain / ANY_PRECISION_FOLDER).exists()
    assert not (models.plain / ACTIVATIONS_FILE).exists()
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


def test_gptq_layers_are_as_the_first_of_their_format_is(models: ShallowModels) -> None:
    four, eight = (models.stored[name] for name in ("gptq4", "gptq8"))
    assert {each.stored for each in four} == {ModuleQuantization(bits=4, group=32, ordered=True, symmetric=True)}
    assert {each.stored for each in eight} == {ModuleQuantization(bits=8, group=16, ordered=False, symmetric=False)}
    ordered = linears_of(ProfiledStage(models.folder("gptq4"), StageSpec(("gptq4",), "bfloat16", 64, 64), CPU))
    assert all(each.get_buffer("order") is not None for each in ordered)


def test_the_planner_knows_the_layers_that_are_stored_alike(models: ShallowModels) -> None:
    """Layer 1 leaves a linear at 16 bits, so what was measured of layer 0 says nothing of it."""
    source = FittedLatency(a_latency_profile(formats=("gptq4", "gptq8"), stored=dict(models.stored)))
    layers = Model.from_config(json.loads(json.dumps(QUANTIZED))).layers
    assert [source.knows_format(layer, "gptq4") for layer in layers] == [True, False, False, False, True]
    assert [source.knows_format(layer, "gptq8") for layer in layers] == [False, False, True, True, False]


def test_a_float8_checkpoint_is_measured_as_it_lies(tmp_path: Path) -> None:
    description = {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": ["k_proj"]}
    models = make_models(FIELDS | {"quantization_config": description}, 2, tmp_path, ("fp8_block",))
    stage = ProfiledStage(models.folder("fp8_block"), StageSpec(("fp8_block",), "bfloat16", 1024, 256), CPU)
    linears = linears_of(stage)
    assert {each.format for each in linears} == {"fp8_block"}
    assert len(linears) == len(models.stored["fp8_block"]) - 1
    assert {each.stored.block for each in models.stored["fp8_block"] if each.stored} == {(16, 32)}
    stage.prepare(Work("decode", 2, 1, 20))
    assert stage.run(Work("decode", 2, 1, 20)).layer > 0
    assert stage.kernels(1) == "fp8_block-converted"


def test_a_linear_that_the_checkpoint_leaves_at_16_bits_stays_there(tmp_path: Path) -> None:
    description = DESCRIPTION | {"dynamic": {r"-:.*\.o_proj": {}}}
    models = make_models(FIELDS | {"quantization_config": description}, 1, tmp_path, ("gptq4",))
    assert sum(each.stored is None for each in models.stored["gptq4"]) == 1
    stage = ProfiledStage(models.folder("gptq4"), StageSpec(("gptq4",), "bfloat16", 1024, 256), CPU)
    assert len(linears_of(stage)) == 6
    stage.prepare(Work("decode", 2, 1, 20))
    assert stage.run(Work("decode", 2, 1, 20)).layer > 0


@pytest.mark.parametrize(
    ("fields", "name", "says"),
    [(FIELDS, "gptq4", "has no quantization_config"), (QUANTIZED, "gptq3", "no layer of this checkpoint is stored so")],
)
def test_a_gptq_format_that_the_model_is_not_stored_in_is_refused(
    fields: dict[str, Any], name: FormatName, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says):
        make_models(fields, 1, tmp_path, (name,))
