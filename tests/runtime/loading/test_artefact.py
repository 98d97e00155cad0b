"""The any-precision copy of a model: what is read equals what was quantized, in any cut; what is damaged or foreign is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from strata_planner.contract.model_folder import MANIFEST_FILE, Recipe
from strata_runtime.errors import InputError
from strata_runtime.formats.any_precision import AnyParent, quantize_any
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.kernels import native_crc
from strata_runtime.loading.artefact import Artefact, find_artefact
from strata_runtime.loading.artefact_manifest import read_manifest
from strata_runtime.loading.artefact_writer import ArtefactWriter
from strata_runtime.loading.load import load_stage
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import CPU, dense_weights, write_artefact
from tests.runtime.loading.stages import load, roles

KEY = "model.layers.1.mlp.down_proj"
WIDE = "model.layers.0.wide"
WIDE_SHAPE = (24, 1600)  # four tiles, the last one short and padded


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)
    write_artefact(model, layers=2)
    return model


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artefact, AnyParent]:
    folder = tmp_path_factory.mktemp("wide")
    generator = torch.Generator().manual_seed(0)
    parent = quantize_any(torch.randn(WIDE_SHAPE, generator=generator))
    ArtefactWriter(folder, "0" * 64, 1, Recipe()).write(0, {WIDE: WIDE_SHAPE}, [(WIDE, parent)])
    manifest = read_manifest(folder)
    assert manifest is not None
    return Artefact(folder, manifest), parent


def found(model: Path) -> Artefact:
    artefact = find_artefact(model)
    assert artefact is not None
    return artefact


@pytest.mark.parametrize("bits", range(3, 9))
def test_what_is_read_is_what_was_quantized(bits: int, pristine: Path) -> None:
    weight = dense_weights(pristine, 1)[KEY]
    expected = quantize_any(weight).at(bits, torch.bfloat16)
    read = found(pristine).read(KEY, bits, torch.bfloat16)
    assert len(read.planes) == bits
    assert all(torch.equal(one, other) for one, other in zip(read.planes, expected.planes, strict=True))
    assert torch.equal(read.table, expected.table)
    assert read.in_features == weight.shape[1]
    assert len({plane.untyped_storage().data_ptr() for plane in read.planes}) == bits  # each can be let go alone


def test_a_file_is_one_that_safetensors_reads(pristine: Path) -> None:
    tensors = load_file(found(pristine).folder / "any-00001.safetensors")
    whole = found(pristine).read(KEY, 8, torch.float16)
    assert torch.equal(tensors[f"{KEY}.plane_0"], whole.planes[0])
    assert torch.equal(tensors[f"{KEY}.table_8"], whole.table)
    assert len(tensors) == 7 * (8 + 6)


@given(
    bits=st.integers(3, 8),
    rows=st.tuples(st.integers(0, 23), st.integers(1, 24)).filter(lambda cut: cut[0] < cut[1]),
    columns=st.sampled_from([None, (0, 512), (512, 1536), (512, 1600), (1536, 1600), (0, 1600)]),
)
def test_a_cut_of_rows_and_columns_is_that_cut_of_the_whole(
    bits: int, rows: tuple[int, int], columns: tuple[int, int] | None, wide: tuple[Artefact, AnyParent]
) -> None:
    artefact, parent = wide
    piece = artefact.read(WIDE, bits, torch.float32, rows=rows, columns=columns)
    first, last = columns or (0, WIDE_SHAPE[1])
    assert torch.equal(piece.dequantized(), parent.dequantized(bits)[slice(*rows), first:last])
    missing = artefact.missing_planes(WIDE, 2, bits, rows=rows, columns=columns)
    assert all(torch.equal(one, other) for one, other in zip(missing, piece.planes[2:], strict=True))


def test_added_planes_make_the_wider_model(wide: tuple[Artefact, AnyParent]) -> None:
    artefact, parent = wide
    linear = AnyLinear(artefact.read(WIDE, 3, torch.float32), None)
    for bits in (5, 8, 4):
        linear.set_bits(
            bits, artefact.table(WIDE, bits, torch.float32), artefact.missing_planes(WIDE, linear.bits, bits)
        )
        assert torch.equal(linear.dequantized(), parent.dequantized(bits))


@pytest.mark.parametrize("by", ["the library", "zlib"])
def test_only_the_wanted_planes_are_read(
    wide: tuple[Artefact, AnyParent], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes the checks."""
    artefact, _ = wide
    counts: list[int] = []

    def preadv(*arguments: Any, real: Callable[..., int] = os.preadv) -> int:
        counts.append(real(*arguments))
        return counts[-1]

    def read_crc32(*arguments: Any, real: Callable[..., tuple[int, Any]] = native_crc.read_crc32) -> tuple[int, Any]:
        read, checks = real(*arguments)
        counts.append(read)
        return read, checks

    if by == "zlib":
        monkeypatch.setattr(native_crc, "available", lambda: False)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(native_crc, "read_crc32", read_crc32)
    artefact.read(WIDE, 3, torch.float32)
    assert counts == [3 * 24 * 1600 // 8, 24 * 8 * 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"columns": (100, 512)},
            r"columns 100\.\.512 do not lie on tiles of 512: cut at multiples of 512 or at the end, 1600",
        ),
        ({"columns": (0, 1599)}, "do not lie on tiles"),
        ({"columns": (512, 2048)}, r"columns 512\.\.2048 are not within its 1600 inputs"),
        ({"rows": (3, 25)}, r"rows 3\.\.25 are not within its 24 outputs"),
        ({"rows": (3, 3)}, r"rows 3\.\.3"),
        ({"bits": 2}, "models of 3 to 8 bits, none of 2"),
        ({"key": "model.layers.0.narrow"}, r"no linear 'model\.layers\.0\.narrow'; it has model\.layers\.0\.wide"),
        ({"key": "lm_head"}, "'lm_head' is no linear of a decoder layer"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_there_is_named(
    arguments: dict[str, object], message: str, wide: tuple[Artefact, AnyParent]
) -> None:
    asked = {"key": WIDE, "bits": 4, "dtype": torch.float32} | arguments
    with pytest.raises(InputError, match=message):
        wide[0].read(**asked)  # type: ignore[arg-type]


def test_a_stage_reads_its_planes_and_not_the_dense_weights(pristine: Path) -> None:
    role = roles(pristine, 1, formats=["any4_a8", "any6"])[0]
    stage = load(role, pristine)
    for layer, bits in enumerate((4, 6)):
        assert {linear.format for linear in stage.linears(layer).values()} == {role.format[layer]}
        weights = dense_weights(pristine, layer)
        linears = stage.linears(layer)
        assert linears.keys() == weights.keys()
        for key, linear in linears.items():
            assert isinstance(linear, AnyLinear)
            assert torch.equal(linear.dequantized(), quantize_any(weights[key]).at(bits, torch.float32).dequantized())
            assert stage.source is not None
            assert torch.equal(stage.source.dense(key), weights[key])


def test_without_a_copy_a_stage_quantizes_the_same_itself(pristine: Path, model: Path) -> None:
    shutil.rmtree(found(model).folder)
    assert find_artefact(model) is None
    role = roles(pristine, 1, formats=["any3", "any5"])[0]
    read, made = load(role, pristine), load(role, model)
    for layer in range(2):
        for key, linear in made.linears(layer).items():
            assert torch.equal(linear.dequantized(), read.linears(layer)[key].dequantized())  # type: ignore[operator]
    assert made.source is not None
    with pytest.raises(InputError, match="has no any-precision copy; run `strata quantize"):
        made.source.missing_planes(KEY, 3, 4)


def test_a_copy_of_another_model_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    with pytest.raises(InputError, match=r"was made of another model \(digest .*: run `strata quantize` again"):
        load(roles(model, 1, formats=["any4", "dense"])[0], model)


def test_a_copy_that_no_layer_needs_refuses_no_load(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (found(model).folder / MANIFEST_FILE).write_text("{")
    stage = load(roles(model, 1, formats=["int4", "dense"])[0], model)
    assert stage.source is not None
    assert stage.source.artefact is None
    assert "precision cannot be changed while the stage runs" in caplog.text


def test_other_weights_of_the_same_shapes_are_another_model(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2, seed=1)
    shutil.copytree(found(model).folder, other / "strata-any")
    with pytest.raises(InputError, match="was made of another model"):
        find_artefact(other)


def test_a_copy_of_another_version_is_refused(model: Path) -> None:
    path = found(model).folder / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 7}))
    with pytest.raises(InputError, match=r"is of version 7, this release reads 1 to 2: run `strata quantize` again"):
        find_artefact(model)


def test_an_unreadable_manifest_is_refused(model: Path) -> None:
    (found(model).folder / MANIFEST_FILE).write_text('{"version": 1}')
    with pytest.raises(InputError, match=r"is damaged .*: run `strata quantize` again"):
        find_artefact(model)


def test_a_truncated_file_is_refused_before_anything_is_loaded(model: Path) -> None:
    victim = found(model).folder / "any-00001.safetensors"
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"any-00001\.safetensors has \d+ bytes where its header says"):
        load(roles(model, 1, formats=["dense", "any4"])[0], model)
    load(roles(model, 1, formats=["any4", "int8"])[0], model)  # whose file is whole


def test_a_layer_that_is_not_finished_is_refused(pristine: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(pristine, tmp_path / "model", ignore=shutil.ignore_patterns("strata-any")))
    write_artefact(model, layers=1)
    with pytest.raises(InputError, match=r"is not finished \(1 of 2 layers, layer 1 is not there\): run `strata"):
        load(roles(model, 1, formats=["dense", "any4"])[0], model)


def test_a_changed_byte_is_found_by_verify(model: Path) -> None:
    artefact = found(model)
    assert list(artefact.verify()) == [0, 1]
    victim = artefact.folder / "any-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-7] ^= 1
    victim.write_bytes(data)
    with pytest.raises(
        InputError,
        match=r"any-00001\.safetensors was changed or damaged .*it has the checksum .*: run `strata quantize` again",
    ):
        list(artefact.verify())


def test_a_node_keeps_the_copy_of_a_model_that_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    beside = found(model)
    kept = tmp_path / "cache" / "strata" / "quantized" / beside.manifest.model_digest
    shutil.move(beside.folder, kept)
    assert found(model).folder == kept
    stage = load_stage(roles(model, 1, formats=["any4", "any4"])[0], model, lambda *_: None, CPU)
    assert all(isinstance(linear, AnyLinear) for linear in stage.linears(0).values())
