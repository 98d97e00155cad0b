"""Laws of loading a checkpoint in float8: at its own bits or at 16 it computes what a plain model of the same weights does, in the bytes that are planned."""

import json
import shutil
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from strata_planner.contract.formats import FormatName
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.formats import stored_bytes_of
from strata_runtime.formats.errors import PrecisionError
from strata_runtime.formats.float8.block_linear import BlockFloat8Linear
from strata_runtime.loading import checkpoint as loading_checkpoint
from strata_runtime.loading.float8_checkpoint import BlockFloat8Checkpoint
from strata_runtime.loading.quantized import quantized_checkpoint
from strata_runtime.ranks.cut import LinearCut
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.float8_models import make_float8_model
from tests.runtime.loading.gptq_models import make_plain_model
from tests.runtime.loading.parity import logits
from tests.runtime.loading.stages import load, roles

torch.set_num_threads(1)
LAYERS = 6
DENSE: tuple[FormatName, ...] = ("dense",) * LAYERS
FLOAT8: tuple[FormatName, ...] = ("fp8_block",) * LAYERS
MODELS = [
    "llama",
    "qwen2",
    "opt",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
]


@pytest.mark.parametrize("name", swept(MODELS, ["qwen2_moe"]))
def test_it_computes_what_a_plain_model_of_its_weights_does(name: str, tmp_path: Path) -> None:
    plain, float8 = make_tiny_model(tmp_path / "plain", name), tmp_path / "float8"
    weights = make_float8_model(plain, float8)
    assert set(Model.from_folder(float8).stored_formats) == {"fp8_block"}
    wanted = logits(make_plain_model(float8, tmp_path / "same", weights), DENSE)
    torch.testing.assert_close(logits(float8, FLOAT8), wanted, atol=1e-5, rtol=0)
    assert torch.equal(logits(float8, DENSE), wanted)


@pytest.mark.parametrize("name", swept(MODELS, ["opt", "qwen2_moe", "qwen3_moe"]))
def test_layers_take_the_bytes_that_the_planner_counts(name: str, tmp_path: Path) -> None:
    """Blocks that divide neither outputs nor inputs; what the description leaves out stays at 16 bits."""
    float8 = tmp_path / "float8"
    make_float8_model(
        make_tiny_model(tmp_path / "plain", name),
        float8,
        block=(20, 24),
        skipped=["lm_head", "model.layers.1.self_attn"],
    )
    stage = load(roles(float8, 1, formats=FLOAT8)[0], float8)
    shapes = Model.from_folder(float8).layers
    counted = [layer_weights_bytes(shape, "fp8_block", "float32") for shape in shapes]
    assert [stored_bytes_of(layer) for layer in stage.layers] == counted


@given(data=st.data())
def test_of_some_outputs_the_blocks_that_they_lie_in_are_read_alone(float8: Path, data: st.DataObject) -> None:
    checkpoint, key = quantized_checkpoint(float8), "model.layers.0.mlp.up_proj.weight"
    assert isinstance(checkpoint, BlockFloat8Checkpoint)
    shape = checkpoint.shape(key)
    edges = data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=6, unique=True).map(sorted))
    rows = tuple(zip(edges[::2], edges[1::2], strict=False))
    columns = data.draw(st.none() | st.tuples(st.integers(0, 15), st.integers(16, shape[1])))
    checkpoint.check([key])  # the header is read
    sizes: list[int] = []

    class Counting(FileIO):
        def readinto(self, buffer: Any) -> int:
            sizes.append(super().readinto(buffer))
            return sizes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading_checkpoint, "FileIO", Counting)
        linear = checkpoint.read_linear({"weight": key}, (shape[0], shape[1]), torch.float32, LinearCut(rows, columns))
    whole = checkpoint.dequantized(key)[:, slice(*(columns or (None,)))]
    assert torch.equal(linear.dequantized(), torch.cat([whole[slice(*each)] for each in rows]))
    first, last = rows[0][0] // BLOCK[0], -(-rows[-1][1] // BLOCK[0])
    read = (min(last * BLOCK[0], shape[0]) - first * BLOCK[0]) * shape[1]
    assert sum(sizes) == read + 2 * (last - first) * -(-shape[1] // BLOCK[1])


def test_scales_of_other_blocks_are_refused_whatever_is_read_of_them(float8: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(float8, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")
    checkpoint, key = quantized_checkpoint(folder), "model.layers.0.mlp.up_proj.weight"
    assert isinstance(checkpoint, BlockFloat8Checkpoint)
    with pytest.raises(PrecisionError, match="scales"):
        checkpoint.read_linear({"weight": key}, (48, 32), torch.float32, LinearCut(rows=((20, 40),)))


BLOCK = (20, 24)


@pytest.fixture(scope="module")
def float8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    make_float8_model(make_tiny_model(folder / "plain", "llama"), folder / "float8", block=BLOCK)
    return folder / "float8"


def test_what_the_description_leaves_out_stays_dense(tmp_path: Path) -> None:
    float8 = tmp_path / "float8"
    make_float8_model(
        make_tiny_model(tmp_path / "plain", "llama"), float8, skipped=[r"model\.layers\.\d+\.mlp", "k_proj"]
    )
    linears = load(roles(float8, 1, formats=FLOAT8)[0], float8).linears(0)
    stored = {key.rpartition(".")[2] for key, linear in linears.items() if isinstance(linear, BlockFloat8Linear)}
    assert stored == {"q_proj", "v_proj", "o_proj"}


def test_experts_that_the_description_leaves_out_are_merged_in_16_bits(tmp_path: Path) -> None:
    plain, float8 = make_tiny_model(tmp_path / "plain", "qwen3_moe"), tmp_path / "float8"
    weights = make_float8_model(plain, float8, skipped=[r"model\.layers\.\d+\.mlp\.experts"])
    stage = load(roles(float8, 1, formats=FLOAT8)[0], float8)
    assert stored_bytes_of(stage.layers[0]) == layer_weights_bytes(
        Model.from_folder(float8).layers[0], "fp8_block", "float32"
    )
    wanted = logits(make_plain_model(float8, tmp_path / "same", weights), DENSE)
    torch.testing.assert_close(logits(float8, FLOAT8), wanted, atol=1e-5, rtol=0)


NAME = "model.layers.1.mlp.experts.2.up_proj"
DAMAGED: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no scales": ({"weight_scale_inv": None}, f"{NAME}.weight is not quantized .* other experts of layer 1 are"),
    "scales of another model": (
        {"weight_scale_inv": torch.ones(3, 7)},
        rf"{NAME}.weight: scales \[3, 7\]; a weight of \[24, 32\] in blocks of \[16, 32\] needs \[2, 1\]",
    ),
    "another type": ({"weight": torch.ones(24, 32)}, f"{NAME}.weight: a weight of torch.float32"),
    "another shape": (
        {"weight": torch.ones(16, 32).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
        rf"does not fit config.json: {NAME}.weight has the shape \[16, 32\], \[24, 32\] is expected",
    ),
    "not a number": ({"weight_scale_inv": torch.tensor([[1.0], [float("nan")]])}, f"{NAME}.weight: 1 codes or scales"),
    "codes that are none": (
        {"weight": torch.full((24, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)},
        f"{NAME}.weight: 768 codes or scales are NaN",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_refused_with_the_tensor(name: str, tmp_path: Path) -> None:
    changed, message = DAMAGED[name]
    float8 = tmp_path / "float8"
    make_float8_model(make_tiny_model(tmp_path / "plain", "qwen3_moe"), float8)
    tensors = load_file(float8 / "model.safetensors")
    for part, tensor in changed.items():
        tensors.pop(f"{NAME}.{part}", None)
        if tensor is not None:
            tensors[f"{NAME}.{part}"] = tensor
    save_file(tensors, float8 / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=message):
        load(roles(float8, 1, formats=FLOAT8)[0], float8)


def test_codes_without_a_description_are_not_taken_for_weights(tmp_path: Path) -> None:
    float8 = tmp_path / "float8"
    make_float8_model(make_tiny_model(tmp_path / "plain", "llama"), float8)
    config = json.loads((float8 / "config.json").read_text())
    del config["quantization_config"]
    (float8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="nothing says by which scales it is read"):
        load(roles(float8, 1)[0], float8)
