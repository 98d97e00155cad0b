"""Loading a stage: what is read, what is left out, how it is stored, and that slices and schedules change nothing."""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import nn

from strata_planner.contract.architectures import SUPPORTED, UnsupportedModelError
from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.frames import Segment
from strata_planner.costs.memory import embedding_bytes
from strata_planner.question.model import Model
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES, QuantLinear, make_linear
from strata_runtime.kernels import native_dense
from strata_runtime.loading import load as load_module
from strata_runtime.loading.blocked import BlockedLinear, can_block
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.load import load_stage
from strata_runtime.model.random_model import make_random_model
from tests.laws import share, swept
from tests.runtime.architectures import ARCHITECTURES, REPRESENTATIVE, SHORT_SWEEP, SWEEP, make_tiny_model, unsliced
from tests.runtime.loading.parity import parity
from tests.runtime.loading.stages import CPU, Stages, load, roles

FORMATS: tuple[FormatName, ...] = ("int8", "w8a8", "int4", "int3")
FUSED_EXPERTS = (
    "deepseek_v3",
    "deepseek_v3-one-query",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoe",
    "llama4_text",
    "llama4",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2_moe",
)


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all tensors that the test's stages read."""
    read: list[str] = []

    class Recording(Checkpoint):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.keys_read = read

    monkeypatch.setattr(load_module, "Checkpoint", Recording)
    return read


def test_every_supported_architecture_is_tested() -> None:
    assert set(ARCHITECTURES) == set(SUPPORTED)


def test_nothing_of_other_layers_is_read(tmp_path: Path, keys_read: list[str]) -> None:
    model = make_tiny_model(tmp_path, "llama")
    for place, role in enumerate(roles(model, 3)):
        keys_read.clear()
        load(role, model)
        layers = {int(key.split(".")[2]) for key in keys_read if key.startswith("model.layers.")}
        outside = {key for key in keys_read if not key.startswith("model.layers.")}
        assert layers == {2 * place, 2 * place + 1}
        assert outside == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", "lm_head.weight"}][place]
        assert len(keys_read) == len(set(keys_read))


def test_a_tied_head_is_read_where_it_is_needed(tmp_path: Path, keys_read: list[str]) -> None:
    model = make_tiny_model(tmp_path, "llama-tied-bias")
    load(roles(model, 2)[1], model)
    assert "model.embed_tokens.weight" in keys_read
    (only,) = roles(model, 1)
    module = load(only, model)._stage.module
    assert module.lm_head.weight is module.model.embed_tokens.weight


@pytest.mark.parametrize("name", SHORT_SWEEP)
def test_a_stage_keeps_no_meta_parameter_and_nothing_of_others(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    middle = load(roles(model, 3)[1], model)
    layers = Model.from_folder(model).layers
    planned = next(each for each in layers if not each.state)
    assert (middle.num_kv_heads, middle.head_dim) == (planned.kv_heads, planned.head_dim)
    assert middle.states == {layer: state for layer in (2, 3) if (state := layers[layer].state)}
    module = middle._stage.module
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert not [key for key, tensor in tensors.items() if tensor.is_meta]
    whole = unsliced(model)
    two_layers = re.compile(r"\.(layers|h)\.[23]\.")
    of_two_layers = sum(p.numel() for key, p in whole.named_parameters() if two_layers.search(key))
    assert sum(p.numel() for p in module.parameters()) == of_two_layers


@pytest.mark.parametrize("name", SWEEP)
def test_a_ragged_batch_over_three_stages_equals_the_unsliced_model(name: str, tmp_path: Path) -> None:
    difference, largest = parity(name, tmp_path)
    assert difference <= 1e-5 * max(1.0, largest)


@pytest.mark.parametrize("name", SHORT_SWEEP)
def test_a_bfloat16_stage_computes_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Hidden states agree with transformers' own bfloat16 ones; routers may send a token to another expert, and what the first tokens read of a
    linear attention is normalised however small it is.
    """
    model = make_tiny_model(tmp_path, name)
    first = Stages(model, roles(model, 2, compute_type="bfloat16")[:1])
    tokens = torch.tensor([5, 17, 3, 60, 22, 9, 41])
    hidden = first.step({0: tokens}, [Segment(0, 0, 7, 0)])
    whole = unsliced(model, torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        expected = whole(tokens[None], output_hidden_states=True).hidden_states[3][0]
    assert hidden.dtype is torch.bfloat16
    error = (hidden.float() - expected.float()).norm() / expected.float().norm()
    assert error < (0.3 if name in FUSED_EXPERTS else 0.1 if Model.from_folder(model).keeps_state else 0.03)


@pytest.mark.parametrize("name", swept(sorted(ARCHITECTURES), REPRESENTATIVE[:4]))
def test_every_architecture_runs_at_mixed_bits(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    formats: list[FormatName] = ["dense", *FORMATS, "int4"]
    stages = Stages(model, roles(model, 2, formats=formats))
    texts = {0: torch.tensor([5, 17, 3, 60]), 1: torch.tensor([11, 4])}
    logits = stages.step(texts, [Segment(0, 0, 4, 1), Segment(1, 0, 2, 1)])
    assert logits.shape == (2, 96)
    assert logits.dtype is torch.float32
    assert logits.isfinite().all()
    layers = stages.models[1]._stage.module.base_model
    quantized = {child.format for child in layers.modules() if isinstance(child, QuantLinear)}
    assert quantized == {"int4", "int3"}
    assert type(stages.models[1]._stage.module.get_output_embeddings()) is nn.Linear


def test_eight_bits_stay_close_to_sixteen(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama", hidden_size=64, intermediate_size=128)
    texts = {0: torch.arange(3, 40)}
    whole = Stages(model, roles(model, 1)).step(texts, [Segment(0, 0, 37, 37)])
    errors = [
        float((Stages(model, roles(model, 1, formats=[name] * 6)).step(texts, [Segment(0, 0, 37, 37)]) - whole).norm())
        / float(whole.norm())
        for name in ("int8", "int4", "int3")
    ]
    assert errors[0] < 0.03
    assert errors == sorted(errors)


@settings(deadline=None, max_examples=share(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 19), unique=True, max_size=6), stages=st.sampled_from([1, 2, 6]))
def test_any_cut_into_stages_and_chunks_gives_the_same_logits(
    cuts: list[int], stages: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = _shared_model(tmp_path_factory)
    tokens = torch.arange(3, 23)
    pipeline = Stages(model, roles(model, stages))
    edges = [0, *sorted(cuts), 20]
    logits = torch.cat(
        [
            pipeline.step({0: tokens}, [Segment(0, start, end - start, end - start)])
            for start, end in itertools.pairwise(edges)
        ]
    )
    whole = unsliced(model, attn_implementation="eager")
    with torch.inference_mode():
        expected = whole(tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def _shared_model(factory: pytest.TempPathFactory) -> Path:
    folder = factory.getbasetemp() / "ministral"
    return folder if (folder / "config.json").exists() else make_tiny_model(folder, "ministral")


@pytest.mark.parametrize(
    ("name", "here", "elsewhere"),
    [("gemma3", "language_model.model.", "model.language_model."), ("gpt2", "transformer.", "")],
)
def test_a_language_model_is_found_under_either_of_its_names(
    name: str, here: str, elsewhere: str, tmp_path: Path
) -> None:
    """As published, and as transformers has its modules."""
    model = make_tiny_model(tmp_path, name)
    tensors = load_file(model / "model.safetensors")
    assert any(key.startswith(here) for key in tensors)
    before = load(roles(model, 2)[0], model)
    save_file({key.replace(here, elsewhere): each for key, each in tensors.items()}, model / "model.safetensors")
    after = load(roles(model, 2)[0], model)
    for one, two in zip(before._stage.module.parameters(), after._stage.module.parameters(), strict=True):
        assert torch.equal(one, two)


def test_progress_counts_layers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    seen: list[tuple[int, int]] = []
    load_stage(roles(model, 2)[0], model, lambda done, total: seen.append((done, total)), CPU)
    assert list(dict.fromkeys(seen)) == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert len(seen) > 4, "it is told of every linear: that of a large layer may take long"


def test_a_layer_that_the_checkpoint_lacks_is_named_before_anything_is_read(
    tmp_path: Path, keys_read: list[str]
) -> None:
    model = make_tiny_model(tmp_path, "llama", shard_bytes=40_000)
    index_file = model / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    del index["weight_map"]["model.layers.3.mlp.down_proj.weight"]
    index_file.write_text(json.dumps(index))
    first, second = roles(model, 2)
    load(first, model)
    keys_read.clear()
    with pytest.raises(InputError, match=r"no tensor for 1 parameters .* model\.layers\.3\.mlp\.down_proj\.weight"):
        load(second, model)
    assert keys_read == []


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(InputError, match=r"does not fit config\.json: .*mlp"):
        load(roles(model, 1)[0], model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not JSON"),
        ("[]", r"config\.json is no JSON object"),
        ('{"model_type": "llama", "hidden_size": "wide"}', r"is not a configuration of 'llama': .*hidden_size"),
    ],
)
def test_an_unreadable_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    role = roles(make_tiny_model(tmp_path, "llama"), 1)[0]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        load(role, tmp_path)


def test_loads_at_once_leave_torch_as_it_was(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    listed = roles(model, 3, compute_type="bfloat16")
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda role: load(role, model), listed * 4))
    assert torch.get_default_dtype() is torch.float32


def test_a_role_beyond_the_model_is_refused(tmp_path: Path) -> None:
    deep = make_tiny_model(tmp_path / "deep", "llama")
    shallow = make_tiny_model(tmp_path / "shallow", "llama", num_hidden_layers=4)
    with pytest.raises(InputError, match=r"layers 3\.\.5; .* has 4: plan again"):
        load(roles(deep, 2)[1], shallow)


def test_fused_experts_at_any_precision_are_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "mixtral")
    with pytest.raises(UnsupportedModelError, match=r"'mixtral' has fused experts, .*: any4 cannot hold"):
        load(roles(model, 1, formats=["any4"] * 6)[0], model)


def test_random_models_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"vocab_size": 32, "num_key_value_heads": 1}
    one, two, other = (
        make_random_model(tmp_path / str(place), "llama", seed=seed, dtype=torch.bfloat16, **small)
        for place, seed in enumerate((1, 1, 2))
    )
    read = [(folder / "model.safetensors").read_bytes() for folder in (one, two, other)]
    assert read[0] == read[1] != read[2]


@pytest.mark.skipif(not native_dense.takes(torch.bfloat16, CPU), reason="this CPU packs no weights")
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_table_that_head_and_embedding_share_is_held_once(tmp_path: Path, model_type: str) -> None:
    model = make_tiny_model(tmp_path, model_type, tie_word_embeddings=True)
    stage = load(roles(model, 1, compute_type="bfloat16")[0], model)
    module = stage._stage.module
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    weight = Checkpoint(model).read(["model.embed_tokens.weight"], torch.bfloat16, CPU)["model.embed_tokens.weight"]
    scale = torch.tensor(module.config.hidden_size**0.5).bfloat16() if model_type == "gemma2" else 1
    ids = torch.tensor([[0, 5, len(weight) - 1]])
    assert torch.equal(table(ids), weight[ids] * scale)
    states = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(head(states), states @ weight.T, atol=1e-2, rtol=2**-7)
    assert not list(head.parameters()) + list(table.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
def test_a_head_of_8_bits_is_the_rounded_table_and_the_embedding_stays_whole(
    tmp_path: Path, compute_type: ComputeType, *, tied: bool
) -> None:
    """It takes the bytes that plans count, too."""
    model = make_tiny_model(tmp_path, "llama", tie_word_embeddings=tied)
    (role,) = roles(model, 1, compute_type=compute_type)
    module = load(structs.replace(role, head_format="int8"), model)._stage.module
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    dtype = COMPUTE_DTYPES[compute_type]
    whole = Checkpoint(model).read([name, "model.embed_tokens.weight"], dtype, CPU)
    ids = torch.tensor([[0, 5, len(whole[name]) - 1]])
    assert torch.equal(table(ids), whole["model.embed_tokens.weight"][ids])
    states = torch.randn(3, whole[name].shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = make_linear(whole[name], None, "int8", dtype, name="head")(states)
    assert torch.equal(head(states), expected)
    torch.testing.assert_close(expected, states @ whole[name].T, atol=2e-2, rtol=2e-2)
    shapes = structs.replace(Model.from_folder(model), head_format="int8")
    held = embedding_bytes(shapes, embedding=True, head=True, compute_type=compute_type)
    parts = [each for part in (head, table, module.model.norm) for each in (*part.parameters(), *part.buffers())]
    assert sum(each.nbytes for each in parts) == held


@pytest.mark.skipif(not can_block(torch.bfloat16, CPU), reason="this CPU does not multiply bfloat16")
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
@pytest.mark.parametrize("shape", [(48, 32), (96, 100)], ids=str)
def test_the_blocked_layout_multiplies_as_nn_linear_does(tokens: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).bfloat16()
    bias = torch.randn(shape[0], generator=generator).bfloat16()
    inputs = torch.randn((1, tokens, shape[1]), generator=generator).bfloat16()
    expected = nn.functional.linear(inputs, weight, bias)
    torch.testing.assert_close(BlockedLinear(weight, bias)(inputs), expected, atol=0, rtol=2**-7)
