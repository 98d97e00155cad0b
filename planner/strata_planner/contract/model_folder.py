"""What Strata's commands leave beside a model's checkpoint: written and read by the runtime, looked for by whoever plans.

The any-precision copy of `strata quantize` is a folder of safetensors files, one per decoder layer, and a manifest that counts those that are finished.
"""

import zlib
from pathlib import Path
from typing import Self

import msgspec

from strata_planner.contract.values import ContractError, Value, from_json, to_json

ANY_PRECISION_FOLDER = "strata-any"  # of `strata quantize`: planes and tables of every layer
MANIFEST_FILE = "manifest.json"  # in that folder
MANIFEST_VERSION = 2
# Version 1 has no check of its own, and none of parts of its files: those are checked whole, by `sha256`.
_READABLE = (
    1,
    2,
)
ACTIVATIONS_FILE = "strata-activations.safetensors"  # calibrated ranges of activations


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
    """One finished file. `shapes`: key of a linear -> [N, K], in the order of the file.

    `checks`: CRC-32 of each linear's tensors, in their order, so that what is read of a file can be checked alone; `header_check`: of all before them.
    """

    layer: int
    size_bytes: int
    sha256: str
    shapes: dict[str, tuple[int, int]]
    checks: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    header_check: int = 0

    @property
    def name(self) -> str:
        return f"any-{self.layer:05d}.safetensors"


class Manifest(Value, frozen=True):
    """`layers`: how many the model has; `files`: those that are finished, by layer; `check`: CRC-32 of its own file, with 0 in this place."""

    version: int
    model_digest: str
    recipe: Recipe
    layers: int
    files: tuple[LayerFile, ...] = ()
    check: int = 0

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """None where there is none. Raises ContractError for one that cannot be read or is of another version."""
        path = folder / MANIFEST_FILE
        if not path.is_file():
            return None
        data = path.read_bytes()
        try:
            version = from_json(data, dict).get("version")
            if version in _READABLE:
                found = from_json(data, cls)
                if version < MANIFEST_VERSION or found.encode() == data:
                    return msgspec.structs.replace(found, version=MANIFEST_VERSION, check=0)
        except ContractError as error:
            raise ContractError(f"{path} is damaged ({error})") from error
        if version in _READABLE:
            raise ContractError(f"{path} is damaged (its bytes are not those that its check says)")
        raise ContractError(f"{path} is of version {version}, this release reads {_READABLE[0]} to {MANIFEST_VERSION}")

    def encode(self) -> bytes:
        """The bytes of its file: no other bytes are read as this manifest."""
        plain = msgspec.structs.replace(self, check=0)
        return to_json(msgspec.structs.replace(plain, check=zlib.crc32(to_json(plain)))) + b"\n"

    @property
    def missing(self) -> list[int]:
        """Layers without a finished file."""
        return sorted(set(range(self.layers)) - {file.layer for file in self.files})

    def of_layer(self, layer: int) -> LayerFile | None:
        return next((file for file in self.files if file.layer == layer), None)
