"""Every form of a model's URI, and what a wrong one says."""

from pathlib import Path
from typing import Any

import pytest

from strata_runtime.errors import InputError
from strata_runtime.loading.uri import MODELS_DIRECTORY_VARIABLE, resolve_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "claim" / "a model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_paths_and_file_uris(model: Path) -> None:
    assert resolve_model(str(model)) == model
    assert resolve_model(f"file://{model}") == model
    assert resolve_model(f"file://{str(model).replace(' ', '%20')}") == model


def test_claims_lie_under_the_mount(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODELS_DIRECTORY_VARIABLE, str(model.parent.parent))
    assert resolve_model("pvc://claim/a model") == model


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://bucket/model", "scheme 's3' is unknown; use file://, pvc://, hf://"),
        ("file://models/llama", "write file:///models/llama"),
        ("/no/such/folder", "/no/such/folder is not a folder here"),
        ("pvc://claim/absent", "/models/claim/absent is not a folder here"),
        ("hf://llama", "write hf://organization/name"),
        ("hf://a/b/c@main", "write hf://organization/name"),
    ],
)
def test_wrong_ones_are_named(uri: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODELS_DIRECTORY_VARIABLE, raising=False)
    with pytest.raises(InputError, match=message):
        resolve_model(uri)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_the_hub_is_asked_for_the_revision(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str], tqdm_class: Any) -> str:
        asked[name] = revision
        with tqdm_class(total=3 << 20, disable=True) as bar:
            for _ in range(6):
                bar.update(1 << 19)
        assert "*.safetensors" in allow_patterns
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    heard: list[int] = []
    assert resolve_model("hf://org/name@v1", lambda: heard.append(1)) == model
    assert sum(heard) == 3, "it is told of every MiB"
    assert resolve_model("hf://org/other") == model
    assert asked == {"org/name": "v1", "org/other": None}


def test_a_hub_that_cannot_be_reached_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(InputError, match="cannot be fetched: no route"):
        resolve_model("hf://org/name")
