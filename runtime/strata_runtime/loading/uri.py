"""From a model's URI to the folder with its files. Called before a stage loads and by whoever reads config.json.

| form                       | where the files are                                                       |
|----------------------------|---------------------------------------------------------------------------|
| `file:///path`, `/path`    | there                                                                     |
| `pvc://claim/path`         | `<mount>/claim/path`; mount is /models or $STRATA_MODELS_DIRECTORY        |
| `hf://org/name[@revision]` | the Hugging Face cache; downloaded first where it is missing              |
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from strata_runtime.errors import InputError

MODELS_DIRECTORY_VARIABLE = "STRATA_MODELS_DIRECTORY"
_DEFAULT_MODELS_DIRECTORY = "/models"
_STEP_BYTES = 1 << 20
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt")


def resolve_model(uri: str, fetched: Callable[[], None] | None = None) -> Path:
    """The folder of the model. `fetched` is called for each MiB or so that comes from the hub, in threads of the hub's.

    Raises InputError for an unknown scheme, a path that is absent or without config.json.
    """
    parts = urlsplit(uri)
    if parts.scheme == "hf":
        folder = _from_hub(uri, fetched or _nobody_asks)
    elif parts.scheme == "pvc":
        mount = os.environ.get(MODELS_DIRECTORY_VARIABLE, _DEFAULT_MODELS_DIRECTORY)
        folder = Path(mount, parts.netloc, unquote(parts.path).lstrip("/"))
    elif parts.scheme == "file":
        if parts.netloc not in {"", "localhost"}:
            raise InputError(f"model {uri!r}: a file URI names no host; write file:///{parts.netloc}{parts.path}")
        folder = Path(unquote(parts.path))
    elif parts.scheme == "":
        folder = Path(uri)
    else:
        raise InputError(f"model {uri!r}: scheme '{parts.scheme}' is unknown; use file://, pvc://, hf:// or a path")
    return _checked(uri, folder)


def _checked(uri: str, folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"model {uri!r}: {folder} is not a folder here; check the path and that its volume is mounted")
    if not (folder / "config.json").is_file():
        raise InputError(f"model {uri!r}: {folder} has no config.json; point at a Hugging Face model folder")
    return folder


def _nobody_asks() -> None:
    pass


def _from_hub(uri: str, fetched: Callable[[], None]) -> Path:
    """`hf://org/name@revision`; the revision may be a branch, a tag or a commit."""
    name, _, revision = uri.removeprefix("hf://").partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise InputError(f"model {uri!r}: write hf://organization/name, with @revision if wanted")
    from huggingface_hub import snapshot_download  # noqa: PLC0415, takes half a second that local models need not wait
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class Heard(tqdm):
        """The hub's own bar, which tells us too."""

        _left: float = _STEP_BYTES

        def update(self, n: float | None = 1) -> Any:
            self._left -= n or 0
            if self._left <= 0:
                self._left = _STEP_BYTES
                fetched()
            return super().update(n)

    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=list(_HUB_FILES), tqdm_class=Heard)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(f"model {uri!r} cannot be fetched: {error}") from error
