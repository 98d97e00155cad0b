"""Writing a model's any-precision copy layer by layer, so that an interrupted run goes on where it stopped.

Called by `strata_runtime.tools.quantize`, and by loads for what they keep (`load_cache`). A file appears under its name when it is whole, then the manifest counts it; a lock per layer keeps two processes
of one node from making the same file twice. Knows nothing of how weights are quantized.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedWriter
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from strata_planner.contract.formats import plane_columns
from strata_planner.contract.model_folder import MANIFEST_VERSION, LayerFile, Manifest, Recipe
from strata_runtime.errors import InputError
from strata_runtime.formats.any_precision import AnyParent
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.loading.artefact_manifest import part_names, read_manifest, write_manifest
from strata_runtime.loading.checkpoint import checked_header
from strata_runtime.loading.digest import crc_of, file_sha256, header_crc

_ALIGNMENT = 8  # of the data in a safetensors file
Shapes = Mapping[str, tuple[int, int]]


class ArtefactWriter:
    """One folder that is being made. What is there of another model, version or recipe is made anew."""

    def __init__(self, folder: Path, model_digest: str, layers: int, recipe: Recipe) -> None:
        self.folder = folder
        self.recipe = recipe
        self._empty = Manifest(MANIFEST_VERSION, model_digest, recipe, layers)
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock("manifest"):
            if self._current() == self._empty:
                write_manifest(folder, self._empty)

    def finished(self, layer: int) -> LayerFile | None:
        """The layer's file, if it is whole and has the checksum that the manifest says: all of it is read."""
        file = self._current().of_layer(layer)
        if file is None:
            return None
        path = self.folder / file.name
        whole = path.is_file() and path.stat().st_size == file.size_bytes and file_sha256(path) == file.sha256
        if whole and not file.checks:  # of a release that took none
            file = with_checks(file, path, self.recipe)
            self._put(file)
        return file if whole else None

    def forget(self, file: LayerFile) -> None:
        """This file is damaged: it is no more, unless another process has made it anew meanwhile."""
        with self.alone(file.layer), self._lock("manifest"):
            current = self._current()
            if current.of_layer(file.layer) == file:
                (self.folder / file.name).unlink(missing_ok=True)
                left = tuple(each for each in current.files if each != file)
                write_manifest(self.folder, _with_files(current, left))

    @contextlib.contextmanager
    def alone(self, layer: int) -> Iterator[None]:
        """Waits until no other process makes this layer. Ask `finished` within."""
        with self._lock(f"any-{layer:05d}"):
            yield

    def write(self, layer: int, shapes: Shapes, parents: Iterable[tuple[str, AnyParent]]) -> LayerFile:
        """One file of one layer: `parents` in the order of `shapes`, each taken when the one before is written. Within `alone`."""
        with self.begun(layer, shapes) as writing:
            for key, parent in parents:
                writing.add(key, pack_planes(parent.codes, self.recipe.bits), parent.tables)
            return writing.finish()

    @contextlib.contextmanager
    def begun(self, layer: int, shapes: Shapes) -> Iterator["LayerWriting"]:
        """One file of one layer, whose linears `shapes` (key -> [N, K]) are added one by one. Within `alone`.

        What a process that was killed left of this file is removed, and in the end what was not finished.
        """
        name = LayerFile(layer, 0, "", {}).name
        for left in self.folder.glob(f".{name}.*"):
            left.unlink()
        scratch = self.folder / f".{name}.{os.getpid()}"
        try:
            with scratch.open("wb") as target:
                yield LayerWriting(self, layer, shapes, target)
        finally:
            scratch.unlink(missing_ok=True)

    def count(self, file: LayerFile, scratch: Path) -> None:
        """A whole file gets its name, then the manifest counts it."""
        scratch.replace(self.folder / file.name)
        self._put(file)

    def _put(self, file: LayerFile) -> None:
        with self._lock("manifest"):
            current = self._current()
            files = {each.layer: each for each in (*current.files, file)}
            write_manifest(self.folder, _with_files(current, tuple(files[each] for each in sorted(files))))

    def _current(self) -> Manifest:
        """The manifest as it is now, without what cannot be kept."""
        try:
            manifest = read_manifest(self.folder) or self._empty
        except InputError:  # damaged or of another version: made anew
            return self._empty
        return manifest if _with_files(manifest, ()) == self._empty else self._empty

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Held until left, or until the process ends, however it does."""
        with (self.folder / f".{name}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class LayerWriting:
    """A layer's file under way, its checksum taken while it is written."""

    def __init__(self, writer: ArtefactWriter, layer: int, shapes: Shapes, target: BufferedWriter) -> None:
        self._writer = writer
        self._layer = layer
        self._shapes = shapes
        self._target = target
        self._left = list(shapes)
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._checks: dict[str, tuple[int, ...]] = {}
        self._header_check = self._put(_header(shapes, writer.recipe))

    def add(self, key: str, planes: Sequence[Tensor], tables: Mapping[int, Tensor]) -> None:
        """The next linear of `shapes`: all planes of the recipe, and its tables float16. On any device."""
        expected, recipe = self._left.pop(0), self._writer.recipe
        columns = plane_columns(self._shapes[expected][1])
        shape = (self._shapes[expected][0], columns // 8)
        assert (key, len(planes), tuple(planes[0].shape)) == (expected, recipe.bits, shape), f"{key} is not {expected}"
        parts = (*planes, *(tables[bits] for bits in range(recipe.seed_bits, recipe.bits + 1)))
        self._checks[key] = tuple(
            self._put(part.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")) for part in parts
        )

    @property
    def whole(self) -> bool:
        """Whether every linear has been added."""
        return not self._left

    def finish(self) -> LayerFile:
        """The file is there from now on."""
        assert self.whole, f"layer {self._layer} lacks {', '.join(self._left)}"
        self._target.flush()
        os.fsync(self._target.fileno())
        file = LayerFile(
            self._layer,
            self._size_bytes,
            self._digest.hexdigest(),
            dict(self._shapes),
            self._checks,
            self._header_check,
        )
        self._writer.count(file, Path(self._target.name))
        return file

    def _put(self, data: bytes | memoryview) -> int:
        """Returns its check."""
        self._target.write(data)
        self._digest.update(data)
        self._size_bytes += len(data)
        return zlib.crc32(data)


def with_checks(file: LayerFile, path: Path, recipe: Recipe) -> LayerFile:
    """As a file is noted now, one that was found right as a whole."""
    names = part_names(recipe)
    header = checked_header(path)
    with path.open("rb", buffering=0) as opened:

        def check(begin: int, end: int) -> int:
            return crc_of(opened.fileno(), begin, end, path)

        checks = {
            key: tuple(check(entry.begin, entry.end) for entry in (header[f"{key}.{name}"] for name in names))
            for key in file.shapes
        }
    return msgspec.structs.replace(file, checks=checks, header_check=header_crc(path))


def file_bytes(shapes: Shapes, recipe: Recipe) -> int:
    """Of a layer with these linears, without its header."""
    widths = range(recipe.seed_bits, recipe.bits + 1)
    return sum(
        rows * (recipe.bits * plane_columns(columns) // 8 + sum(2 << bits for bits in widths))
        for rows, columns in shapes.values()
    )


def _with_files(manifest: Manifest, files: tuple[LayerFile, ...]) -> Manifest:
    return Manifest(manifest.version, manifest.model_digest, manifest.recipe, manifest.layers, files)


def _header(shapes: Shapes, recipe: Recipe) -> bytes:
    """Of safetensors: every tensor's type, shape and place, known before any weight is quantized."""
    entries: dict[str, dict[str, object]] = {}
    offset = 0
    for key, (out_features, in_features) in shapes.items():
        row_bytes = plane_columns(in_features) // 8
        tensors = [(f"plane_{place}", "U8", row_bytes, row_bytes) for place in range(recipe.bits)]
        tensors += [(f"table_{bits}", "F16", 1 << bits, 2 << bits) for bits in range(recipe.seed_bits, recipe.bits + 1)]
        for name, kind, width, width_bytes in tensors:
            stop = offset + out_features * width_bytes
            entries[f"{key}.{name}"] = {
                "dtype": kind,
                "shape": [out_features, width],
                "data_offsets": [offset, stop],
            }
            offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
