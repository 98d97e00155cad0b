"""Damaged checkpoints are refused before any weight is read, by the name of the shard."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from strata_runtime.errors import InputError
from strata_runtime.loading.checkpoint import Checkpoint
from tests.runtime.architectures import make_tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = make_tiny_model(tmp_path, "llama", shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_truncated_shard_is_named_with_both_sizes(sharded: Path) -> None:
    victim = shards(sharded)[1]
    whole = victim.stat().st_size
    with victim.open("r+b") as file:
        file.truncate(whole - 100)
    checkpoint = Checkpoint(sharded)
    with pytest.raises(InputError, match=f"{victim.name} has {whole - 100} bytes where its header says {whole}"):
        checkpoint.check(checkpoint.keys)
    assert checkpoint.keys_read == []


def test_a_shard_cut_within_its_header_is_named(sharded: Path) -> None:
    victim = shards(sharded)[0]
    with victim.open("r+b") as file:
        file.truncate(20)
    checkpoint = Checkpoint(sharded)
    with pytest.raises(InputError, match=f"{victim.name} is truncated or no safetensors file"):
        checkpoint.check(checkpoint.keys)


def test_a_header_is_not_read_at_whatever_length_it_claims(sharded: Path) -> None:
    victim = shards(sharded)[0]
    with victim.open("r+b") as file:
        file.truncate(1 << 40)  # sparse
        file.write(((1 << 40) - 8).to_bytes(8, "little"))
    with pytest.raises(InputError, match="a header at most 100000000"):
        Checkpoint(sharded).check(Checkpoint(sharded).keys)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    victim = shards(sharded)[-1]
    victim.unlink()
    checkpoint = Checkpoint(sharded)
    with pytest.raises(InputError, match=f"{victim.name} is missing: fetch the checkpoint again"):
        checkpoint.check(checkpoint.keys)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.0.ghost.weight"] = shards(sharded)[0].name
    (sharded / INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint(sharded)
    with pytest.raises(InputError, match=r"lacks 1 tensors .* model\.layers\.0\.ghost\.weight"):
        checkpoint.check(checkpoint.keys)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="only safetensors checkpoints are read"):
        Checkpoint(tmp_path)


def test_an_unreadable_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(InputError, match="is not a safetensors index"):
        Checkpoint(tmp_path)


def test_tensors_outlive_their_file(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    key = "model.layers.0.self_attn.q_proj.weight"
    first = checkpoint.read([key], torch.bfloat16, torch.device("cpu"))[key]
    kept = first.clone()
    for shard in shards(sharded):
        shard.write_bytes(b"\0" * shard.stat().st_size)
    assert first.dtype is torch.bfloat16
    assert torch.equal(first, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
def test_a_tensor_is_converted_as_a_whole_one_is(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Strip by strip, the last one short."""
    stored = torch.randn(300, 333, generator=torch.Generator().manual_seed(0))
    save_file({"w": stored, "n": torch.arange(5)}, tmp_path / "model.safetensors")
    read = Checkpoint(tmp_path).read(["w", "n"], dtype, torch.device("cpu"))
    assert torch.equal(read["w"], stored.to(dtype or torch.float32))
    assert read["n"].dtype is torch.int64
