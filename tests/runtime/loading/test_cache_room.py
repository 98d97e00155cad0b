"""What a node keeps stays within its bound: the least recently used goes first, never what is used, nor what no load could make again."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_planner.contract.model_folder import MANIFEST_FILE, MANIFEST_VERSION, Manifest, Recipe
from strata_runtime.errors import InputError
from strata_runtime.loading import load_cache
from strata_runtime.loading.artefact_manifest import cache_folder
from strata_runtime.loading.cache_room import LIMIT_VARIABLE, Claim, limit_bytes, make_room
from strata_runtime.loading.load_cache import kept_by_loads
from tests.laws import share
from tests.runtime.architectures import make_tiny_model
from tests.runtime.loading.stages import load, roles

Model = tuple[int, bool]  # bytes that are kept of it, whether a slot uses it


def a_folder(root: Path, place: int, size: int) -> Path:
    folder = root / f"model-{place:02d}"
    folder.mkdir(parents=True)
    (folder / "any-00000.safetensors").write_bytes(bytes(size))
    Claim(folder)
    os.utime(root / f".{folder.name}.lock", (place, place))
    return folder


@settings(max_examples=share(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    models=st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=6),
    needed=st.integers(0, 200),
    limit=st.integers(0, 400),
)
def test_the_bound_holds_or_nothing_is_added(
    models: list[Model], needed: int, limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("cache")
    folders = [a_folder(root, place, size) for place, (size, _) in enumerate(models)]
    claims = [Claim(folder) for folder, (_, used) in zip(folders, models, strict=True) if used]
    for place, folder in enumerate(folders):
        os.utime(root / f".{folder.name}.lock", (place, place))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIMIT_VARIABLE, str(limit))
        try:
            make_room(root / "new", needed, lambda: False)
            fits = True
        except OSError:
            fits = False
    left = [folder.exists() for folder in folders]
    total = needed + sum(size for (size, _), there in zip(models, left, strict=True) if there)
    assert fits == (total <= limit)
    assert all(there for there, (_, used) in zip(left, models, strict=True) if used), "what is used stays"
    free = [(there, size) for there, (size, used) in zip(left, models, strict=True) if not used]
    assert [there for there, _ in free] == sorted(there for there, _ in free), "the oldest went first"
    gone = [size for there, size in free if not there]
    if gone:
        assert total + gone[-1] > limit, "no more went than had to"
    assert len(claims) == sum(used for _, used in models)


def test_a_calibrated_copy_is_no_loads_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_folder(tmp_path, 1, 100)
    manifest = Manifest(MANIFEST_VERSION, "0", Recipe(text_sha256="1"), 1)
    (folder / MANIFEST_FILE).write_bytes(manifest.encode())
    monkeypatch.setenv(LIMIT_VARIABLE, "10")
    make_room(tmp_path / "new", 10, lambda: False)
    assert folder.exists()


def test_a_full_disk_is_a_reason_too(tmp_path: Path) -> None:
    folders = [a_folder(tmp_path, place, 10) for place in range(3)]
    make_room(tmp_path / "new", 1, folders[0].exists)
    assert [folder.exists() for folder in folders] == [False, True, True]


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("1000", 1000), ("2Ki", 2048), ("3Gi", 3 << 30)])
def test_limits_are_quantities(text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    assert limit_bytes(tmp_path) == expected
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with pytest.raises(InputError, match=r"STRATA_CACHE_LIMIT='much' is no number of bytes: write it as 200Gi"):
        limit_bytes(tmp_path)


def test_a_load_makes_room_by_what_no_stage_uses_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load_cache, "FREE_SHARE", 0.0)
    models = [
        make_tiny_model(tmp_path / name, "llama", num_hidden_layers=2, seed=seed) for seed, name in enumerate("abc")
    ]
    stages, folders = [], []
    for model in models[:2]:
        stages.append(load(roles(model, 1, formats=["any4"] * 2)[0], model, keep=True))
        kept = kept_by_loads(model)
        assert kept is not None
        folders.append(kept.folder)
    del kept
    size = sum(path.stat().st_size for path in folders[0].iterdir())
    monkeypatch.setenv(LIMIT_VARIABLE, str(int(2.2 * size)))
    del stages[0]
    gc.collect()
    load(roles(models[2], 1, formats=["any4"] * 2)[0], models[2], keep=True)
    third = kept_by_loads(models[2])
    assert third is not None
    assert not third.manifest.missing
    assert [folder.exists() for folder in folders] == [False, True]
    assert cache_folder("x").parent == third.folder.parent
