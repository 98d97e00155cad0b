"""Any single byte of an any-precision copy that is changed after it was written is found before it is served, and what mends it is named."""

import re
import shutil
from pathlib import Path
from typing import Self

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER, MANIFEST_FILE, Manifest
from strata_planner.contract.values import to_json
from strata_runtime.errors import InputError
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.kernels import native_crc
from strata_runtime.loading import load_cache
from strata_runtime.loading.artefact import Artefact, find_artefact
from strata_runtime.loading.artefact_manifest import read_manifest
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.load_cache import kept_by_loads
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.tools.quantize.any_copy import Job, make_copy
from tests.laws import share
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.artefacts import CPU, write_artefact
from tests.runtime.loading.stages import load, roles

LAYERS = 2
FILES = (MANIFEST_FILE, "any-00000.safetensors", "any-00001.safetensors")
BYTES = st.tuples(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
Flip = tuple[str, float, int]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a copy beside it."""
    model = Path(shutil.copytree(plain, tmp_path_factory.mktemp("copy") / "model"))
    write_artefact(model, layers=LAYERS)
    return model


@pytest.fixture
def cached(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a load of `plain` has filled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_cache, "FREE_SHARE", 0.0)
    at(plain, "any8")
    kept = kept_by_loads(plain)
    assert kept is not None
    return kept.folder


class Flipped:
    """A byte of a file that is another one, for a while."""

    def __init__(self, folder: Path, flip: Flip) -> None:
        name, place, change = flip
        self._path = folder / name
        self._whole = self._path.read_bytes()
        self.offset = int(place * len(self._whole))
        self._change = change

    def __enter__(self) -> Self:
        data = bytearray(self._whole)
        data[self.offset] ^= self._change
        self._path.write_bytes(data)
        return self

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._whole)


def at(model: Path, name: FormatName, *, verify: bool = True) -> StageModel:
    role = roles(model, 1, formats=[name] * LAYERS)[0]
    return load_stage(role, model, lambda *_: None, CPU, LoadOptions(keep=True, verify=verify))


def weights(stage: StageModel) -> list[torch.Tensor]:
    return [value for layer in stage.layers for value in layer.state_dict().values()]


def same(one: StageModel, other: StageModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def opened(model: Path) -> Artefact:
    artefact = find_artefact(model)
    assert artefact is not None
    return artefact


@settings(max_examples=share(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flip=BYTES, bits=st.sampled_from([3, 5, 8]))
def test_a_changed_byte_is_refused_by_name_or_is_none_that_is_served(model: Path, flip: Flip, bits: int) -> None:
    """And those that are not served now are found when a layer moves to where they would be."""
    held = served(model, bits)
    assert isinstance(held, list)
    with Flipped(model / ANY_PRECISION_FOLDER, flip):
        if flip[0] == MANIFEST_FILE:
            with pytest.raises(InputError, match=r"manifest\.json is (damaged|of version).*`strata quantize` again"):
                at(model, "any8")
            return
        told = rf"{flip[0]}.*`strata quantize` again"
        again = served(model, bits)
        if isinstance(again, InputError):
            assert re.search(told, str(again))
        else:
            assert all(torch.equal(a.dequantized(), b.dequantized()) for a, b in zip(held, again, strict=True))
            with pytest.raises(InputError, match=told):
                read_all(opened(model))
        with pytest.raises(InputError, match=told):
            list(opened(model).verify())


def served(model: Path, bits: int) -> list[PlanesWeight] | InputError:
    """What a slot would serve, or why it does not."""
    try:
        artefact = opened(model)
        return [artefact.read(key, bits, torch.float32) for file in artefact.manifest.files for key in file.shapes]
    except InputError as error:
        return error


def read_all(artefact: Artefact) -> None:
    """As layers that move to all widths one after the other."""
    for file in artefact.manifest.files:
        for key in file.shapes:
            artefact.missing_planes(key, 0, 8)
            for width in range(3, 9):
                artefact.table(key, width, torch.float32)


@pytest.fixture(params=["as they are read", "beside the load"])
def checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """When they are taken: by the native library, or by zlib."""
    if request.param == "beside the load":
        monkeypatch.setattr(native_crc, "available", lambda: False)
    return str(request.param)


@settings(max_examples=share(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), layer=st.integers(0, 1))
def test_a_load_compares_all_that_it_reads_before_it_is_done(
    model: Path, checks: str, place: float, change: int, layer: int
) -> None:
    """At the widest, whose tables of other widths are all that it does not read."""
    artefact = opened(model)
    name = FILES[1 + layer]
    expected = at(model, "any8")
    entries = artefact._header(layer)
    with Flipped(artefact.folder, (name, place, change)) as flipped:
        unread = any(
            entry.begin <= flipped.offset < entry.end
            for key, entry in entries.items()
            if ".table_" in key and not key.endswith("table_8")
        )
        if unread:
            assert same(at(model, "any8"), expected)
        else:
            with pytest.raises(InputError, match=rf"{name}.*run `strata quantize` again"):
                at(model, "any8")


@settings(max_examples=share(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flip=BYTES)
def test_what_the_node_keeps_heals_itself(plain: Path, cached: Path, flip: Flip) -> None:
    expected = at(plain, "any8")
    with Flipped(cached, flip):
        assert same(at(plain, "any8"), expected)
        kept = kept_by_loads(plain)
        assert kept is not None
        for key in kept.manifest.files[0].shapes:
            kept.read(key, 8, torch.float32)


def test_a_node_cache_that_cannot_be_changed_is_refused_with_its_folder(
    plain: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(load_cache.ArtefactWriter, "forget", fail)
    with Flipped(cached, (FILES[1], 0.5, 1)), pytest.raises(InputError, match=rf"run `rm -r {cached}`, the next load"):
        at(plain, "any8")


def test_without_verifying_it_is_said_and_loaded(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Flipped(opened(model).folder, (FILES[1], 0.5, 1)):
        at(model, "any8", verify=False)
    assert "is not compared with its checks (--no-verify): damaged planes would be served" in caplog.text


def older(artefact: Artefact) -> None:
    """The manifest as release 0.1.0 wrote it."""
    files = tuple(msgspec.structs.replace(file, checks={}, header_check=0) for file in artefact.manifest.files)
    told = msgspec.json.decode(to_json(msgspec.structs.replace(artefact.manifest, version=1, files=files)))
    del told["check"]
    for file in told["files"]:
        del file["checks"], file["headerCheck"]
    (artefact.folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(told))


def test_a_copy_of_the_first_release_is_compared_as_a_whole_and_gets_its_checks(model: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(model, tmp_path / "model"))
    older(opened(old))
    expected = at(model, "any4")
    assert same(at(old, "any4"), expected)
    with Flipped(opened(old).folder, (FILES[1], 0.5, 1)), pytest.raises(InputError, match="has the checksum"):
        at(old, "any4")
    made = make_copy(Job(old, opened(old).folder, 8), lambda *_: None)
    assert all(layer.kept for layer in made), "nothing is quantized again"
    assert read_manifest(opened(old).folder) == read_manifest(opened(model).folder)
    assert Manifest.of_folder(opened(old).folder) == opened(model).manifest


def test_checks_are_those_of_zlib_wherever_they_are_taken(model: Path) -> None:
    load(roles(model, 1, formats=["any3", "any8"])[0], model)
    artefact = opened(model)
    assert {len(each) for file in artefact.manifest.files for each in file.checks.values()} == {8 + 6}
