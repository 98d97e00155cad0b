"""The names and the manifest of what `strata quantize` writes: one any-precision copy of a model's linears, a file per decoder layer.

Read by `artefact` and written by `artefact_writer`. Layout of a layer's file (safetensors): for each linear, by its path in the model,
`<key>.plane_0` ... (uint8 [N, columns / 8], one after the other, the most significant first, see `precision.planes`), then
`<key>.table_3` ... (float16 [N, 2^k]). What stays at 16 bits (embedding, norms, biases, head) stays in the checkpoint.
"""

import os
import re
from pathlib import Path

from strata_planner.contract.values import ContractError, Value, from_json, to_json
from strata_runtime.errors import InputError

ARTEFACT_VERSION = 1
FOLDER_NAME = "strata-any"
MANIFEST_NAME = "manifest.json"
AGAIN = "run `strata quantize` again"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Recipe(Value, frozen=True):
    """How the weights were quantized: files of another recipe are never mixed.

    `bits`: of the widest model that can be read; `seed_bits`: of the narrowest; `text_sha256`: of the calibration's text, None without one;
    `refitted`: widths whose tables are fitted to the inputs that the text gives.
    """

    bits: int = 8
    seed_bits: int = 3
    text_sha256: str | None = None
    refitted: tuple[int, ...] = ()


class LayerFile(Value, frozen=True):
    """One finished file. `shapes`: key of a linear -> [N, K], in the order of the file."""

    layer: int
    size_bytes: int
    sha256: str
    shapes: dict[str, tuple[int, int]]

    @property
    def name(self) -> str:
        return f"any-{self.layer:05d}.safetensors"


class Manifest(Value, frozen=True):
    """`layers`: how many the model has; `files`: those that are finished, by layer."""

    version: int
    model_digest: str
    recipe: Recipe
    layers: int
    files: tuple[LayerFile, ...] = ()

    @property
    def missing(self) -> list[int]:
        """Layers without a finished file."""
        return sorted(set(range(self.layers)) - {file.layer for file in self.files})

    def of_layer(self, layer: int) -> LayerFile | None:
        return next((file for file in self.files if file.layer == layer), None)


def layer_of(key: str) -> int:
    """The decoder layer that a linear belongs to, from its path in the model."""
    found = _LAYER.search(key)
    if found is None:
        raise InputError(f"'{key}' is no linear of a decoder layer; keys look like model.layers.0.mlp.down_proj")
    return int(found[1])


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none. Raises InputError for one that cannot be read or is of another version."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        version = from_json(data, dict).get("version")
        if version != ARTEFACT_VERSION:
            raise InputError(f"{path} is of version {version}, this release reads {ARTEFACT_VERSION}: {AGAIN}")
        return from_json(data, Manifest)
    except ContractError as error:
        raise InputError(f"{path} is damaged ({error}): {AGAIN}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Whole or not at all."""
    scratch = folder / f".{MANIFEST_NAME}.{os.getpid()}"
    scratch.write_bytes(to_json(manifest) + b"\n")
    scratch.replace(folder / MANIFEST_NAME)


def cache_folder(digest: str) -> Path:
    """Where a node keeps the artefact of a model whose own folder cannot be written."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "strata", "quantized", digest)
