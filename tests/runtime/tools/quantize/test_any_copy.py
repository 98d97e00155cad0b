"""Making the any-precision copy: what it holds, that it goes on after a break, and that two processes share the work."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from strata_planner.contract.architectures import UnsupportedModelError
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER
from strata_runtime.errors import InputError
from strata_runtime.formats.any_precision import quantize_any, refit
from strata_runtime.loading.artefact import Artefact, find_artefact
from strata_runtime.loading.artefact_manifest import read_manifest
from strata_runtime.model.random_model import make_random_model
from strata_runtime.tools.calibration.fisher import calibrated_layers, fisher_diagonals
from strata_runtime.tools.calibration.kept import FOLDER, KeptStates
from strata_runtime.tools.calibration.layers import LayeredModel, Piece
from strata_runtime.tools.quantize.any_copy import Job, make_copy
from tests.laws import swept
from tests.runtime.architectures import ARCHITECTURES, REPRESENTATIVE, make_tiny_model
from tests.runtime.loading.artefacts import dense_weights
from tests.runtime.loading.test_load import FUSED_EXPERTS

LAYERS = 3
WINDOWS = (torch.arange(1, 20), torch.arange(30, 50))


class Stopped(Exception):  # noqa: N818  no error: the user's Ctrl-C
    pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=LAYERS)


def job(model: Path, **fields: object) -> Job:
    return Job(model, **({"folder": model / ANY_PRECISION_FOLDER, "bits": 8} | fields))  # type: ignore[arg-type]


def quiet(_done: int, _total: int) -> None:
    pass


def found(model: Path) -> Artefact:
    artefact = find_artefact(model)
    assert artefact is not None
    return artefact


def test_every_linear_is_there_as_it_is_quantized(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = make_copy(job(model), lambda *counts: seen.append(counts))
    assert [layer.layer for layer in done] == [0, 1, 2]
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(weight.numel() for weight in dense_weights(model, 0).values()) * LAYERS
    artefact = found(model)
    assert list(artefact.verify()) == [0, 1, 2]
    for key, weight in dense_weights(model, 2).items():
        assert torch.equal(artefact.read(key, 8, torch.float32).dequantized(), quantize_any(weight).dequantized(8))


@pytest.mark.parametrize("name", swept(sorted(set(ARCHITECTURES) - set(FUSED_EXPERTS)), REPRESENTATIVE))
def test_every_architecture_has_a_copy(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, name)
    make_copy(job(model, bits=3), quiet)
    assert not found(model).manifest.missing


def test_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "mixtral")
    with pytest.raises(UnsupportedModelError, match="'mixtral' has fused experts"):
        make_copy(job(model), quiet)


def test_a_calibration_weighs_errors(model: Path) -> None:
    make_copy(job(model, windows=WINDOWS, refit=False), quiet)
    artefact = found(model)
    assert artefact.manifest.recipe.text_sha256 is not None
    diagonals = {key: value for _, layer in fisher_diagonals(model, WINDOWS) for key, value in layer.items()}
    for key, weight in dense_weights(model, 1).items():
        expected = quantize_any(weight, importance=diagonals[key]).dequantized(4)
        assert torch.equal(artefact.read(key, 4, torch.float32).dequantized(), expected)


@pytest.mark.slow  # a second copy
@pytest.mark.parametrize("bits", swept([4, 8], [4]))
def test_and_tables_are_fitted_to_its_inputs(bits: int, model: Path) -> None:
    make_copy(job(model, windows=WINDOWS, bits=bits), quiet)
    artefact = found(model)
    fitted = tuple(range(3, min(bits, 5) + 1))
    assert artefact.manifest.recipe.refitted == fitted
    of_layer = {each.layer: each for each in calibrated_layers(model, WINDOWS)}
    changed = set()
    for key, weight in dense_weights(model, 1).items():
        plain = quantize_any(weight, bits, importance=of_layer[1].fisher[key])
        expected = refit(plain, weight, of_layer[1].hessians[key], widths=fitted)
        for width in range(3, bits + 1):
            assert torch.equal(artefact.read(key, width, torch.float16).table, expected.tables[width])
            changed |= {width} if not torch.equal(expected.tables[width], plain.tables[width]) else set()
    assert changed == set(fitted)


def test_fewer_bits_are_the_same_model_and_a_smaller_copy(model: Path) -> None:
    whole = sum(layer.size_bytes for layer in make_copy(job(model), quiet))
    wide = found(model).read("model.layers.0.mlp.up_proj", 5, torch.float32)
    narrow = sum(layer.size_bytes for layer in make_copy(job(model, bits=5), quiet))
    artefact = found(model)
    assert narrow < whole
    assert artefact.widths == range(3, 6)
    assert torch.equal(artefact.read("model.layers.0.mlp.up_proj", 5, torch.float32).table, wide.table)


@pytest.mark.parametrize("share", swept([0.0, 0.2, 0.5, 0.99], [0.5]))
def test_an_interrupted_run_goes_on(share: float, model: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done and done >= share * total:
            raise Stopped

    with pytest.raises(Stopped):
        make_copy(job(model), stop)
    manifest = read_manifest(model / ANY_PRECISION_FOLDER)
    assert manifest is not None
    finished = {file.layer for file in manifest.files}
    assert len(finished) == int(share * LAYERS)
    if len(finished) < LAYERS:
        with pytest.raises(InputError, match=f"is not finished \\({len(finished)} of 3 layers"):
            found(model).check(range(LAYERS))
    done = make_copy(job(model), quiet)
    assert {layer.layer for layer in done if layer.kept} == finished
    assert list(found(model).verify()) == [0, 1, 2]


@pytest.mark.slow  # the test below has one that goes on
@pytest.mark.parametrize("layers", swept([0, 1, 2], [1]))
def test_an_interrupted_calibration_comes_to_the_same_bytes(layers: int, model: Path, tmp_path: Path) -> None:
    made, whole = model / ANY_PRECISION_FOLDER, tmp_path / "whole"

    def stop(_done: int, _total: int) -> None:
        if len(list(made.glob("any-*"))) >= layers:
            raise Stopped

    with pytest.raises(Stopped):
        make_copy(job(model, windows=WINDOWS), stop)
    seen: list[tuple[int, int]] = []
    done = make_copy(job(model, windows=WINDOWS), lambda *counts: seen.append(counts))
    assert [layer.kept for layer in done] == [layer >= LAYERS - layers for layer in range(LAYERS)]
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    make_copy(Job(model, whole, 8, windows=WINDOWS), quiet)
    files = {path.name for path in whole.glob("*.safetensors")} | {"manifest.json"}
    assert len(files) == LAYERS + 1
    assert all((made / name).read_bytes() == (whole / name).read_bytes() for name in files)


@pytest.mark.slow  # a second copy
@pytest.mark.parametrize("other", swept(["another text", "a longer one", "no text", "not fitted"], ["another text"]))
def test_another_calibration_makes_all_anew(other: str, model: Path) -> None:
    make_copy(job(model, windows=WINDOWS), quiet)
    chosen: dict[str, dict[str, object]] = {
        "another text": {"windows": (WINDOWS[0], WINDOWS[1] + 1)},
        "a longer one": {"windows": (*WINDOWS, torch.arange(5, 25))},
        "no text": {},
        "not fitted": {"windows": WINDOWS, "refit": False},
    }
    fields = chosen[other]
    assert not any(layer.kept for layer in make_copy(job(model, **fields), quiet))
    assert all(layer.kept for layer in make_copy(job(model, **fields), quiet))


def test_a_copy_without_a_calibration_is_kept_as_ever(model: Path) -> None:
    """Manifests that say nothing of fitted tables have none."""
    make_copy(job(model), quiet)
    manifest = model / ANY_PRECISION_FOLDER / "manifest.json"
    older = json.loads(manifest.read_text()) | {"version": 1}
    del older["recipe"]["refitted"], older["check"]
    manifest.write_text(json.dumps(older))
    assert all(layer.kept for layer in make_copy(job(model), quiet))


def test_what_a_killed_run_left_is_removed(model: Path) -> None:
    folder = model / ANY_PRECISION_FOLDER
    folder.mkdir()
    (folder / ".any-00001.safetensors.4711").write_bytes(b"half a file")
    make_copy(job(model), quiet)
    assert not list(folder.glob(".any-*.safetensors.*"))


@pytest.mark.parametrize("damage", swept(["changed", "cut", "removed"], ["changed"]))
def test_a_damaged_file_is_made_again(damage: str, model: Path) -> None:
    make_copy(job(model), quiet)
    victim = model / ANY_PRECISION_FOLDER / "any-00001.safetensors"
    data = victim.read_bytes()
    if damage == "removed":
        victim.unlink()
    else:
        victim.write_bytes(data[:-1] + (b"" if damage == "cut" else bytes([data[-1] ^ 1])))
    done = make_copy(job(model), quiet)
    assert [layer.kept for layer in done] == [True, False, True]
    assert victim.read_bytes() == data


@pytest.mark.parametrize("other", swept(["recipe", "model", "version", "no manifest at all"], ["model"]))
def test_what_cannot_be_kept_is_made_again(other: str, model: Path, tmp_path: Path) -> None:
    make_copy(job(model, bits=7 if other == "recipe" else 8), quiet)
    manifest = model / ANY_PRECISION_FOLDER / "manifest.json"
    if other == "model":
        shapes = {"num_hidden_layers": LAYERS, "seed": 5}
        (make_tiny_model(tmp_path / "other", "llama", **shapes) / "model.safetensors").replace(
            model / "model.safetensors"
        )
    if other == "version":
        manifest.write_text(manifest.read_text().replace('"version":2', '"version":0'))
    if other == "no manifest at all":
        manifest.write_text("{")
    assert not any(layer.kept for layer in make_copy(job(model), quiet))
    assert list(found(model).verify()) == [0, 1, 2]


@pytest.mark.slow  # a second process imports torch
def test_two_processes_make_every_file_once(model: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(_ready)
        begun = pool.apply_async(_make, (model,))
        made = _make(model) + begun.get()
    assert sorted(made) == [0, 1, 2]
    assert list(found(model).verify()) == [0, 1, 2]


def _ready() -> None:
    """The process has imported all that quantizing needs."""


def _make(model: Path) -> list[int]:
    """The layers that this process made itself."""
    return [layer.layer for layer in make_copy(job(model), quiet) if not layer.kept]


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    model = make_random_model(
        tmp_path,
        "llama",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data.replace(b"q_proj.weight", b"q_proj.qweigh"))
    with pytest.raises(
        InputError, match=r"no dense weight for 1 linears, for instance model\.layers\.0\.self_attn\.q_proj"
    ):
        make_copy(job(model), quiet)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("calibrated")
    model = make_tiny_model(folder / "model", "llama", num_hidden_layers=LAYERS)
    make_copy(job(model, windows=WINDOWS, folder=folder / "copy"), quiet)
    return folder / "copy"


@pytest.mark.parametrize("stopped_at", swept([1, 3, 4, 5, 6, 8, 10], [4]))
def test_an_interrupted_calibration_goes_on_where_it_stopped(
    stopped_at: int, model: Path, calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was passed is not passed again but for the layer that was at work, and the copy is the same, byte by byte."""
    loaded: list[int] = []
    real = LayeredModel.layer

    def layer(self: LayeredModel, index: int) -> Piece:
        loaded.append(index)
        return real(self, index)

    monkeypatch.setattr(LayeredModel, "layer", layer)
    steps = 0

    def stop(_done: int, _total: int) -> None:
        nonlocal steps
        steps += 1
        if steps > stopped_at:
            raise Stopped

    with pytest.raises(Stopped):
        make_copy(job(model, windows=WINDOWS), stop)
    make_copy(job(model, windows=WINDOWS), quiet)
    assert len(loaded) <= 2 * LAYERS + 1
    assert not (model / ANY_PRECISION_FOLDER / FOLDER).exists()
    for path in calibrated.glob("*.*"):
        assert path.read_bytes() == (model / ANY_PRECISION_FOLDER / path.name).read_bytes()


def test_states_of_another_text_or_damaged_ones_are_not_used(model: Path) -> None:
    folder = model / ANY_PRECISION_FOLDER / FOLDER
    with KeptStates(folder, "one") as kept:
        kept.put("a", [torch.ones(3), torch.zeros(2, 2)])
        with KeptStates(folder, "one") as second:
            assert not second.has("a"), "the folder is another process's: its own is in memory"
            second.put("a", [torch.zeros(1)])
    with KeptStates(folder, "one") as kept:
        found = kept.get("a", torch.device("cpu"))
        assert found is not None
        assert [each.tolist() for each in found] == [[1, 1, 1], [[0, 0], [0, 0]]]
        path = next(folder.glob("a*"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert kept.get("a", torch.device("cpu")) is None
    with KeptStates(folder, "two") as kept:
        assert not kept.has("a")


def test_where_states_cannot_be_kept_the_copy_is_made_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("strata_runtime.tools.calibration.kept.save_file", fail)
    make_copy(job(model, windows=WINDOWS), quiet)
    assert list(found(model).verify()) == [0, 1, 2]
    assert "stay in memory, an interrupted run begins it anew: no space left" in caplog.text
