"""What loads keep: the next load reads it and is the same stage; whatever is missing, damaged, foreign or cannot be written costs time alone."""

import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.model_folder import MANIFEST_FILE
from strata_runtime.errors import InputError
from strata_runtime.formats.any_precision import quantize_any
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.loading import load_cache
from strata_runtime.loading.artefact import Artefact, find_artefact
from strata_runtime.loading.artefact_manifest import cache_folder
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.digest import model_digest
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.load_cache import kept_by_loads
from strata_runtime.loading.precision_switch import read_change
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.tools.quantize.any_copy import Job, make_copy
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import CPU, dense_weights, write_artefact
from tests.runtime.loading.stages import load, roles

torch.set_num_threads(1)

LAYERS = 3
FORMATS: tuple[FormatName, ...] = ("any3", "any4_a8", "any8")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a cache of its own, on a disk with room."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_cache, "FREE_SHARE", 0.0)
    return make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=LAYERS)


def whole(model: Path, formats: Sequence[FormatName] = FORMATS, compute_type: ComputeType = "float32") -> StageModel:
    return load(roles(model, 1, formats=formats, compute_type=compute_type)[0], model, keep=True)


def kept(model: Path) -> Artefact:
    artefact = kept_by_loads(model)
    assert artefact is not None
    return artefact


def state(stage: StageModel) -> dict[str, torch.Tensor]:
    """All that the stage stores, by name."""
    modules = enumerate(stage.layers)
    return {f"{place}.{name}": value for place, layer in modules for name, value in layer.state_dict().items()}


def assert_same(one: StageModel, other: StageModel) -> None:
    assert state(one).keys() == state(other).keys()
    assert all(torch.equal(value, state(other)[name]) for name, value in state(one).items())


def quantized(stage: StageModel) -> int:
    """How many linears this load read densely, of which it made planes."""
    assert stage.source is not None
    return sum(name.endswith("proj.weight") for name in stage.source._checkpoint.keys_read)


def files(folder: Path) -> dict[str, int]:
    """When each was last changed."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def move(stage: StageModel, layer: int, bits: int) -> None:
    change = read_change(stage, layer, bits)
    change.apply()
    change.release()


LINEARS = 7  # of a layer


@pytest.mark.parametrize("compute_type", swept(["float32", "bfloat16"], ["bfloat16"]))
def test_the_next_load_reads_what_the_first_one_made(model: Path, compute_type: ComputeType) -> None:
    cold = whole(model, compute_type=compute_type)
    assert quantized(cold) == LAYERS * LINEARS
    before = files(kept(model).folder)
    warm = whole(model, compute_type=compute_type)
    assert quantized(warm) == 0
    assert files(kept(model).folder) == before
    assert_same(cold, warm)
    assert list(kept(model).verify()) == [0, 1, 2]


def test_other_bits_and_another_compute_type_are_read_from_it_too(model: Path) -> None:
    whole(model)
    stage = whole(model, ["any8", "any5", "any3"], "bfloat16")
    assert quantized(stage) == 0
    for layer, bits in enumerate((8, 5, 3)):
        for key, weight in dense_weights(model, layer).items():
            linear = stage.linears(layer)[key]
            assert isinstance(linear, AnyLinear)
            expected = quantize_any(weight).at(bits, torch.bfloat16)
            assert torch.equal(linear.dequantized(), expected.dequantized())


def test_without_a_cache_a_stage_is_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = whole(model, compute_type="bfloat16")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "model" / "config.json"))
    assert_same(whole(model, compute_type="bfloat16"), cold)


@pytest.mark.slow  # test_precision_switch.py has layers that move
def test_layers_move_after_a_load_that_quantized_them(model: Path) -> None:
    stage = whole(model, ["any4"] * LAYERS)
    expected = {bits: whole(model, [f"any{bits}"] * LAYERS) for bits in range(3, 9)}  # type: ignore[list-item]
    for bits in (8, 3, 6):
        for layer in range(LAYERS):
            move(stage, layer, bits)
        assert_same(stage, expected[bits])


def test_a_dense_stage_moves_to_what_another_load_has_kept(model: Path) -> None:
    whole(model, ["any4", "dense", "any4"])
    before, after = whole(model, ["dense"] * LAYERS), whole(model, ["any5", "dense", "int8"])
    move(before, 0, 5)
    move(after, 0, 3)
    assert_same(before, whole(model, ["any5", "dense", "dense"]))
    assert_same(after, whole(model, ["any3", "dense", "int8"]))
    with pytest.raises(InputError, match=f"no any-precision copy of it, .* run `strata quantize {model}`"):
        read_change(before, 1, 4)


def test_each_stage_adds_its_layers(model: Path) -> None:
    stages = roles(model, LAYERS, formats=FORMATS)
    load(stages[2], model, keep=True)
    assert kept(model).manifest.missing == [0, 1]
    load(stages[0], model, keep=True)
    assert kept(model).manifest.missing == [1]
    assert quantized(whole(model)) == LINEARS
    assert not kept(model).manifest.missing


def test_who_does_not_keep_reads_what_is_there(model: Path) -> None:
    load(roles(model, LAYERS, formats=FORMATS)[0], model, keep=True)
    before = files(kept(model).folder)
    stage = load(roles(model, 1, formats=FORMATS)[0], model)
    assert quantized(stage) == (LAYERS - 1) * LINEARS
    assert files(kept(model).folder) == before


def test_layers_of_other_formats_are_not_kept(model: Path) -> None:
    whole(model, ["dense", "any6", "int4"])
    assert kept(model).manifest.missing == [0, 2]


@pytest.mark.parametrize("damage", swept(["cut", "removed", "exchanged"], ["exchanged"]))
def test_a_damaged_file_is_made_again_and_no_other(damage: str, model: Path) -> None:
    cold = whole(model)
    folder = kept(model).folder
    victim, data, before = (
        folder / "any-00001.safetensors",
        (folder / "any-00001.safetensors").read_bytes(),
        files(folder),
    )
    if damage == "removed":
        victim.unlink()
    else:
        victim.write_bytes(data[:-3] if damage == "cut" else b"no tensors")
    again = whole(model)
    assert quantized(again) == LINEARS
    assert_same(again, cold)
    assert victim.read_bytes() == data
    assert files(folder)["any-00002.safetensors"] == before["any-00002.safetensors"]


@pytest.mark.parametrize("damage", swept(["unreadable", "another release", "another recipe"], ["another recipe"]))
def test_a_manifest_that_cannot_be_used_begins_anew(damage: str, model: Path) -> None:
    cold = whole(model)
    manifest = kept(model).folder / MANIFEST_FILE
    text = manifest.read_text()
    changed = {
        "unreadable": "{",
        "another release": text.replace('"version":2', '"version":3'),
        "another recipe": text.replace('"recipe":{', '"recipe":{"bits":7'),
    }
    assert changed[damage] != text
    manifest.write_text(changed[damage])
    again = whole(model)
    assert quantized(again) == LAYERS * LINEARS
    assert_same(again, cold)
    assert list(kept(model).verify()) == [0, 1, 2]


def test_an_edit_that_the_models_digest_does_not_see_is_seen(model: Path) -> None:
    whole(model)
    weights = model / "model.safetensors"
    digest, data = model_digest(model), bytearray(weights.read_bytes())
    data[Checkpoint(model).header(weights.name)["model.layers.1.mlp.up_proj.weight"].begin] ^= 1
    weights.write_bytes(data)
    assert model_digest(model) == digest
    assert quantized(whole(model)) == LAYERS * LINEARS


def test_a_load_that_is_stopped_keeps_the_layers_that_are_done(model: Path) -> None:
    def stop(done: int, _total: int) -> None:
        if done == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        load_stage(roles(model, 1, formats=FORMATS)[0], model, stop, CPU, LoadOptions(keep=True))
    folder = kept(model).folder
    assert kept(model).manifest.missing == [2]
    assert not list(folder.glob(".any-*.safetensors.*"))
    assert quantized(whole(model)) == LINEARS  # nobody holds the lock of the layer that was begun


@pytest.mark.slow  # test_any_copy has the same law; a second process imports torch
def test_two_processes_at_once_quantize_every_layer_once(model: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(_ready)
        begun = pool.apply_async(_load, (model,))
        one, of_one = _load(model)
        other, of_other = begun.get()
    assert of_one + of_other == LAYERS * LINEARS
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert list(kept(model).verify()) == [0, 1, 2]


def _ready() -> None:
    """The process has imported all that a load needs."""


def _load(model: Path) -> tuple[dict[str, torch.Tensor], int]:
    load_cache.FREE_SHARE = 0.0
    stage = whole(model)
    return state(stage), quantized(stage)


def _no_folder(cache: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder would be")


def _no_room_to_spare(_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_cache, "FREE_SHARE", 1.0)


def _no_room_at_all(_cache: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("way", swept([_no_folder, _no_room_to_spare, _no_room_at_all], [_no_room_at_all]))
def test_where_nothing_can_be_kept_one_warning_is_all(
    way: Callable[[Path, pytest.MonkeyPatch], None],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        way(tmp_path / "cache", monkeypatch)
        stage = whole(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("is not kept there") == 1
    for key, weight in dense_weights(model, 1).items():
        expected = quantize_any(weight).dequantized(4)
        assert torch.equal(stage.linears(1)[key].dequantized(), expected)  # type: ignore[operator]
    assert not list(tmp_path.glob("cache/**/*.safetensors*"))
    with pytest.raises(InputError, match="no any-precision copy"):
        read_change(stage, 0, 5)


def test_what_is_there_is_read_where_nothing_can_be_added(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(roles(model, LAYERS, formats=FORMATS)[0], model, keep=True)
    folder = kept(model).folder
    (folder / ".manifest.lock").unlink()
    (folder / ".manifest.lock").mkdir()  # stands for a folder that cannot be written, for every user
    stage = whole(model)
    assert quantized(stage) == (LAYERS - 1) * LINEARS
    assert caplog.text.count("is not kept there") == 1
    move(stage, 0, 8)
    with pytest.raises(InputError, match="no any-precision copy of it"):
        read_change(stage, 1, 8)


def test_a_copy_of_the_command_wins(model: Path) -> None:
    whole(model)
    node = cache_folder(model_digest(model))
    assert node != kept(model).folder
    windows = (torch.arange(1, 20), torch.arange(30, 50))
    assert not any(layer.kept for layer in make_copy(Job(model, node, 8, windows=windows), lambda *_: None))
    calibrated = whole(model)
    assert calibrated.source is not None
    assert calibrated.source.artefact is not None
    assert calibrated.source.artefact.folder == node
    write_artefact(model, layers=LAYERS)
    found = find_artefact(model)
    assert found is not None
    assert found.folder == model / "strata-any"


def test_a_calibration_keeps_nothing_that_loads_made(model: Path) -> None:
    """Even in their own folder, which the command can be told to write to."""
    whole(model)
    folder = kept(model).folder
    windows = (torch.arange(1, 20),)
    assert not any(layer.kept for layer in make_copy(Job(model, folder, 8, windows=windows), lambda *_: None))
    assert kept_by_loads(model) is None


def test_scratch_of_a_killed_load_is_removed(model: Path) -> None:
    load(roles(model, LAYERS, formats=FORMATS)[0], model, keep=True)
    left = kept(model).folder / f".any-00001.safetensors.{os.getpid() + 1}"
    left.write_bytes(b"half a file")
    whole(model)
    assert not left.exists()


def test_a_copied_model_is_kept_by_itself(model: Path, tmp_path: Path) -> None:
    whole(model)
    other = Path(shutil.copytree(model, tmp_path / "other"))
    os.utime(other / "model.safetensors", (1, 1))
    assert kept_by_loads(other) is None
