"""A gpt-oss checkpoint with experts in MXFP4 is the plain model of the values that its codes stand for, at any precision."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.formats import FormatName
from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.loading.quantized import read_model_config
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.parity import logits
from tests.runtime.loading.shared import shared
from tests.runtime.loading.stages import load, roles

QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint in MXFP4, and the plain one of the same values."""
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    make_tiny_model(plain, "gpt_oss", intermediate_size=64)
    shutil.copytree(plain, packed, dirs_exist_ok=True)
    tensors = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    stored = dict(tensors)
    for key in sorted(key for key in tensors if key.endswith("_proj") and ".experts." in key):
        experts, inputs, outputs = tensors[key].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        tensors[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del stored[key]
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    return packed, plain


@pytest.mark.parametrize("name", swept(["dense", "int4"], ["int4"]))
def test_it_computes_as_the_plain_model_of_its_values(folders: tuple[Path, Path], name: FormatName) -> None:
    packed, plain = folders
    assert torch.equal(logits(packed, [name] * 6), logits(plain, [name] * 6))


@pytest.mark.slow  # test_quantized_experts.py has other formats
def test_ranks_read_their_experts_alone(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    [role] = roles(packed, 1)
    expected = logits(plain, stages=1)
    for computed in shared(packed, 3, role):
        torch.testing.assert_close(
            computed, expected, rtol=0, atol=1e-4
        )  # sums of what is far larger than random weights


def test_it_is_planned_as_the_plain_model(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    assert Model.from_folder(packed) == Model.from_folder(plain)


def test_scales_that_do_not_fit_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {key: tensors[key][:, :, :1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.experts\.down_proj has scales"):
        load(roles(tmp_path, 1)[0], tmp_path)


def test_mxfp4_of_other_models_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "mixtral")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    with pytest.raises(UnsupportedModelError, match="quantized by 'mxfp4' are not read"):
        read_model_config(tmp_path)
