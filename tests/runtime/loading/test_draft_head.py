"""Heads in the published layouts: which load, and what is told of those that do not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.draft_head import DraftHead, is_draft_head
from strata_runtime.errors import InputError
from strata_runtime.loading.draft_head import HeadFolder
from strata_runtime.model.random_model import make_random_model
from tests.runtime.slot.eagle_heads import DRAFT_VOCABULARY, head_config, head_tensors, write_head

CPU = torch.device("cpu")
VOCABULARY = 128
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_random_model(
        tmp_path_factory.mktemp("target"), "llama", vocab_size=VOCABULARY, num_hidden_layers=6, **shapes
    )


def loaded(folder: Path) -> Tensors:
    """All that a head is made of, by what it is for."""
    head = HeadFolder(folder).load(VOCABULARY, nn.Embedding(VOCABULARY, 32), torch.float32, CPU)
    unit = torch.eye(64)
    linears = {
        name: linear(
            torch.eye(96)
            if name == "fc"
            else unit
            if name == "qkv"
            else torch.eye(48)
            if name == "down"
            else unit[:32, :32]
        )
        for name, linear in head.linears._asdict().items()
    }
    return head.norms._asdict() | linears | {"targets": head.targets}


SPELLINGS: dict[str, Callable[[str], str]] = {
    "SafeAILab": lambda key: key,
    "SpecForge": lambda key: key if key in {"d2t", "t2d"} else f"model.{key}",
    "numbered": lambda key: key.replace("midlayer.", "layers.0."),
    "numbered, in a model": lambda key: "model." + key.replace("midlayer.", "layers.0."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_published_spellings_are_one_head(target: Path, tmp_path: Path, spelling: str) -> None:
    config = head_config(target)
    plain = head_tensors(config)
    renamed = {SPELLINGS[spelling](key): tensor for key, tensor in plain.items()}
    expected = loaded(write_head(tmp_path / "plain", config, plain))
    found = loaded(write_head(tmp_path / "renamed", config | {"architectures": ["LlamaForCausalLM"]}, renamed))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_rows_of_the_small_vocabulary_come_in_the_models_order(target: Path, tmp_path: Path) -> None:
    """So that one draw in both picks the same token, where both think so."""
    config = head_config(target)
    tensors = head_tensors(config)
    order = torch.randperm(DRAFT_VOCABULARY, generator=torch.Generator().manual_seed(9))
    targets = tensors["d2t"] + torch.arange(DRAFT_VOCABULARY)
    mixed = tensors | {
        "d2t": targets[order] - torch.arange(DRAFT_VOCABULARY),
        "lm_head.weight": tensors["lm_head.weight"][order].clone(),
    }
    expected, found = (
        loaded(write_head(tmp_path / name, config, each)) for name, each in (("one", tensors), ("other", mixed))
    )
    assert torch.equal(found["targets"], expected["targets"])
    assert torch.equal(found["logits"], expected["logits"])


def test_a_head_of_the_whole_vocabulary_needs_no_table(target: Path, tmp_path: Path) -> None:
    config = head_config(target, draft_vocab_size=VOCABULARY)
    tensors = head_tensors(config)
    del tensors["d2t"], tensors["t2d"]
    assert loaded(write_head(tmp_path, config, tensors))["targets"].tolist() == list(range(VOCABULARY))


def test_layers_are_named_by_what_enters_them_or_by_what_leaves_them() -> None:
    """At the top of config.json as vLLM reads it, in `eagle_config` as SpecForge writes it."""
    name = "eagle_aux_hidden_state_layer_ids"
    plain = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size"), 8
    )
    assert is_draft_head(plain)
    assert DraftHead.from_config(plain).fused_layers(32) == (1, 15, 28)
    assert DraftHead.from_config(plain | {name: [2, 16, 29]}).fused_layers(32) == (1, 15, 28)
    assert DraftHead.from_config(plain | {"eagle_config": {name: [1, 15, 28]}}).fused_layers(32) == (1, 15, 28)
    with pytest.raises(UnsupportedModelError, match=r"layers \[1, 0, -2\].* has the layers 0\.\.1"):
        DraftHead.from_config(plain).fused_layers(2)
    with pytest.raises(UnsupportedModelError, match="is 'low', a list of 3 layers is needed"):
        DraftHead.from_config(plain | {name: "low"})


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def with_(**changed: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name]) for name, change in changed.items()}


BAD: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "a tensor less": ({}, without("midlayer.hidden_norm.weight"), "lacks 1 tensors, for instance layer.hidden_norm.weight.*fetch it again"),
    "a second layer": ({}, lambda each: each | {"layers.1.mlp.up_proj.weight": torch.ones(2)}, "has 1 that no such head has.*layers.1"),
    "another shape": ({"intermediate_size": 40}, lambda each: each, r"is \[48, 32\], by its config.json it is \[40, 32\]"),
    "no table": ({}, without("d2t"), "drafts 48 of 128 tokens and has no tensor d2t"),
    "beyond the vocabulary": ({}, with_(d2t=lambda each: each + 100), "maps 48 tokens to 48 from .*the tokens 0 to 127"),
    "below 0": ({}, with_(d2t=lambda each: each - 100), "from -.*take a head of this model"),
    "one token twice": ({}, with_(d2t=lambda each: -torch.arange(48)), "maps 48 tokens to 1 from 0 to 0"),
    "another mask": ({}, with_(t2d=lambda each: ~each), "d2t and t2d name different tokens"),
    "two layers": ({"num_hidden_layers": 2}, lambda each: each, "it has 2 layers and the activation silu"),
    "gelu": ({"hidden_act": "gelu"}, lambda each: each, "activation gelu"),
    "a tied table": ({"tie_word_embeddings": True}, lambda each: each, "sets tie_word_embeddings"),
    "an output norm": ({"norm_output": True}, lambda each: each, "sets norm_output: heads that compute so do not run"),
    "no states": ({"eagle_config": {"use_aux_hidden_state": False}}, lambda each: each, "use_aux_hidden_state false"),
    "no width": ({"hidden_size": None}, lambda each: each, "its hidden_size is None, a whole number of at least 1"),
    "no head": ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, lambda each: each, "no EAGLE-3 head.*mode draft"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_whole_head_is_refused(target: Path, tmp_path: Path, case: str) -> None:
    changes, spoil, said = BAD[case]
    tensors = spoil(head_tensors(head_config(target)))
    tmp_path.joinpath("config.json").write_text(json.dumps(head_config(target) | changes))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises((InputError, UnsupportedModelError), match=said):
        HeadFolder(tmp_path).targets(VOCABULARY)


def test_a_checkpoint_of_pickles_is_refused(target: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps(head_config(target)))
    tmp_path.joinpath("pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="only safetensors checkpoints are read"):
        HeadFolder(tmp_path)
