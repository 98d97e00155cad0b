"""Reading a model's any-precision copy: the planes and the table of any width, of any rows and tile-aligned columns of a linear.

Called by `load_stage`, and by a slot that changes precision while it runs (`missing_planes`, `table`). Every answer is memory of its own,
a tensor per plane, so that a plane that is dropped is returned. Reads are positioned: several threads may read at once, and
processes share the page cache. Who writes: `artefact_writer`.

What is checked when: the manifest, version, model and finished layers at opening; size and header of a file before its first byte is used; each
plane and table when it is read, by its check in the manifest: as it is read where the library takes checks (`native_crc`), else by `checked`, beside
other work where that says so, as is a part of which only a cut is read. A file of an older release, which has no checks of its parts, is compared as
a whole with its checksum once. `verify` takes a pass over all bytes (`strata quantize --verify`).
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from strata_planner.contract.formats import plane_columns
from strata_planner.contract.model_folder import ANY_PRECISION_FOLDER, MANIFEST_FILE, LayerFile, Manifest
from strata_runtime.errors import InputError
from strata_runtime.formats.planes.planes import TILE_COLUMNS
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.kernels import native_crc
from strata_runtime.loading.artefact_manifest import AGAIN, cache_folder, layer_of, part_names, read_manifest
from strata_runtime.loading.cache_room import Claim, claimed
from strata_runtime.loading.checkpoint import Entry, checked_header
from strata_runtime.loading.digest import crc_of, file_sha256, header_crc, model_digest
from strata_runtime.loading.shadow import Place, Shadow
from strata_runtime.loading.verify import Check, at_once, never
from strata_runtime.ranges import Range

_STRIP_BYTES = 1 << 22  # of a plane, read at once where columns are cut out of it


class DamagedError(InputError):
    """A file is not as it was written. `file`: as its manifest has it."""

    def __init__(self, message: str, file: LayerFile) -> None:
        super().__init__(message)
        self.file = file


class Artefact:
    """One opened folder. `read` and its like raise InputError for a key, a width or a range that it does not have.

    `pinned`: what is read lies in page-locked memory, from which copies to a GPU run beside other work.
    `shadow`: whole planes and tables that are there are taken, not read; they were checked when they came there.
    `checked`: what runs the check of each thing that is read (`verify`): at once, later by another thread, or never. A check raises DamagedError.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.pinned = False
        self.shadow: Shadow | None = None
        self.mend = f"{AGAIN}, it makes this layer anew"  # what is damaged
        self.claim: Claim | None = None  # where the node may remove what nobody uses
        self.checked: Callable[[Check], None] = at_once
        self._whole: set[str] = set()  # checksums of files that were compared as a whole
        self._comparing = threading.Lock()
        self._headers: dict[int, dict[str, Entry]] = {}

    @property
    def widths(self) -> range:
        """The numbers of bits that can be read."""
        return range(self.manifest.recipe.seed_bits, self.manifest.recipe.bits + 1)

    def shape(self, key: str) -> tuple[int, int]:
        """[N, K] of a linear."""
        file = self._file(layer_of(key))
        if key not in file.shapes:
            raise InputError(f"{self.folder / file.name} has no linear '{key}'; it has {', '.join(file.shapes)}")
        return file.shapes[key]

    def check(self, layers: Iterable[int]) -> None:
        """The files of these layers are finished, whole and have the header that they should. Raises InputError."""
        for layer in layers:
            self._header(layer)

    def read(
        self, key: str, bits: int, dtype: torch.dtype, *, rows: Range | None = None, columns: Range | None = None
    ) -> PlanesWeight:
        """The `bits`-bit model of a linear, on the CPU: only the first `bits` planes are read.

        rows: outputs [r0, r1); columns: inputs [k0, k1), of which k0 is a multiple of 512 and k1 too unless it is K. Equal to the same
        cut of the whole. The table is in `dtype`.
        """
        _, in_features = self.shape(key)
        first, last = columns or (0, in_features)
        planes = self._planes(key, range(self._width(bits)), rows, columns)
        return PlanesWeight(planes, self.table(key, bits, dtype, rows=rows), last - first)

    def missing_planes(
        self, key: str, from_bits: int, to_bits: int, *, rows: Range | None = None, columns: Range | None = None
    ) -> tuple[Tensor, ...]:
        """The planes that follow the first `from_bits` (0: none is held) in the model of `to_bits`: what `AnyLinear.set_bits` adds."""
        return self._planes(key, range(from_bits, self._width(to_bits)), rows, columns)

    def table(self, key: str, bits: int, dtype: torch.dtype, *, rows: Range | None = None) -> Tensor:
        """The centroids [N, 2^bits] of that width."""
        first, last = self._rows(key, rows)
        entry = self._entry(key, f"table_{self._width(bits)}")
        whole = last - first == self.shape(key)[0]
        if whole and (kept := self._kept(key, entry)) is not None:
            return kept.view(torch.float16).view(last - first, 1 << bits).to(dtype)
        stored = torch.empty(last - first, 1 << bits, dtype=torch.float16, pin_memory=self.pinned)
        with self._opened(key) as file:
            found = file.fill([stored], entry.begin + 2 * first * stored.shape[1], checked=whole and self._as_read(key))
        self._check(key, [f"table_{bits}"], [stored] if whole else None, found)
        return stored.to(dtype)

    def places(self, key: str, bits: int) -> list[tuple[Place, int]]:
        """What `read` reads of a linear, with the check of each; nothing where the file has no checks of its parts."""
        file = self._file(layer_of(key))
        if not file.checks:
            return []
        noted = dict(zip(part_names(self.manifest.recipe), file.checks[key], strict=True))
        names = [*(f"plane_{place}" for place in range(self._width(bits))), f"table_{bits}"]
        entries = [(name, self._entry(key, name)) for name in names]
        return [(Place(self.folder / file.name, entry.begin, entry.end), noted[name]) for name, entry in entries]

    def verify(self) -> Iterator[int]:
        """Reads all bytes and compares checksums; yields each layer when it is found right. Raises InputError at the first that is not."""
        for file in self.manifest.files:
            self._header(file.layer)
            self._compare_whole(file)
            yield file.layer
        self.check(self.manifest.missing)

    def _compare_whole(self, file: LayerFile) -> None:
        actual = file_sha256(self.folder / file.name)
        if actual != file.sha256:
            raise self._damaged(file, "it", f"the checksum {actual}", file.sha256)

    def _damaged(self, file: LayerFile, what: str, found: str, noted: object) -> DamagedError:
        return DamagedError(
            f"{self.folder / file.name} was changed or damaged after it was written ({what} has {found}, its manifest says {noted}): "
            f"{self.mend}",
            file,
        )

    def _as_read(self, key: str) -> bool:
        """Whether the checks of a linear's parts are taken while they are read: at the cost of a few instructions, as they lie in the cache."""
        return native_crc.available() and self.checked is not never and bool(self._file(layer_of(key)).checks)

    def _check(
        self, key: str, names: Sequence[str], tensors: Sequence[Tensor] | None, found: Sequence[int] | None = None
    ) -> None:
        """Of parts of a linear that have been read into `tensors`; None: a cut of them was read, and all of each is read again. `found`: their checks,
        where they were taken as they were read.
        """
        if self.checked is never:
            return
        file = self._file(layer_of(key))
        entries = [self._entry(key, name) for name in names]

        def take() -> Iterator[int]:
            for place, entry in enumerate(entries):
                yield self._crc(file, entry) if tensors is None else native_crc.crc32(_bytes_of(tensors[place]))

        if found is not None:
            self._compare(file, key, names, found)
        elif file.checks:
            self.checked(lambda: self._compare(file, key, names, take()))
        else:
            self.checked(lambda: self._compare_whole_once(file))

    def _compare(self, file: LayerFile, key: str, names: Sequence[str], found: Iterable[int]) -> None:
        noted = dict(zip(part_names(self.manifest.recipe), file.checks[key], strict=True))
        for name, check in zip(names, found, strict=True):
            if check != noted[name]:
                raise self._damaged(file, f"{key}.{name}", f"the check {check:08x}", f"{noted[name]:08x}")

    def _compare_whole_once(self, file: LayerFile) -> None:
        with self._comparing:
            if file.sha256 not in self._whole:
                self._compare_whole(file)
                self._whole.add(file.sha256)

    def _crc(self, file: LayerFile, entry: Entry) -> int:
        path = self.folder / file.name
        with path.open("rb", buffering=0) as opened:
            return crc_of(opened.fileno(), entry.begin, entry.end, path)

    def _planes(self, key: str, places: range, rows: Range | None, columns: Range | None) -> tuple[Tensor, ...]:
        out_features, in_features = self.shape(key)
        if not places:
            return ()
        first, last = self._rows(key, rows)
        row_bytes = plane_columns(in_features) // 8
        cut = _byte_range(key, in_features, columns)
        names = [f"plane_{place}" for place in places]
        entries = [self._entry(key, name) for name in names]
        shape = (last - first, cut[1] - cut[0])
        whole = cut == (0, row_bytes) and last - first == out_features
        if whole and self.shadow is not None and len(places) > 1:
            return tuple(self._planes(key, range(place, place + 1), None, None)[0] for place in places)
        if whole and (kept := self._kept(key, entries[0])) is not None:
            return (kept.view(shape),)
        planes = tuple(torch.empty(shape, dtype=torch.uint8, pin_memory=self.pinned) for _ in places)
        found = None
        with self._opened(key) as file:
            if whole:  # they lie one after the other
                found = file.fill(planes, entries[0].begin, checked=self._as_read(key))
            elif cut == (0, row_bytes):
                for plane, entry in zip(planes, entries, strict=True):
                    file.fill([plane], entry.begin + first * row_bytes)
            else:
                for plane, entry in zip(planes, entries, strict=True):
                    file.fill_columns(plane, entry.begin + first * row_bytes, row_bytes, cut)
        self._check(key, names, planes if whole else None, found)
        return planes

    def _width(self, bits: int) -> int:
        if bits not in self.widths:
            raise InputError(
                f"{self.folder} has models of {self.widths[0]} to {self.widths[-1]} bits, none of {bits}: quantize again with --bits {bits}"
            )
        return bits

    def _rows(self, key: str, rows: Range | None) -> Range:
        out_features, _ = self.shape(key)
        first, last = rows or (0, out_features)
        if not 0 <= first < last <= out_features:
            raise InputError(f"{key}: rows {first}..{last} are not within its {out_features} outputs")
        return first, last

    def _file(self, layer: int) -> LayerFile:
        file = self.manifest.of_layer(layer)
        if file is None:
            done = len(self.manifest.files)
            raise InputError(
                f"{self.folder} is not finished ({done} of {self.manifest.layers} layers, layer {layer} is not there): {AGAIN}, it goes on"
            )
        return file

    def _header(self, layer: int) -> dict[str, Entry]:
        if layer not in self._headers:
            file = self._file(layer)
            path = self.folder / file.name
            self._check_header(file, path)
            header = checked_header(path, AGAIN)
            size = path.stat().st_size
            if size != file.size_bytes:
                raise InputError(f"{path} has {size} bytes, its manifest says {file.size_bytes}: {AGAIN}")
            self._headers[layer] = header
        return self._headers[layer]

    def _check_header(self, file: LayerFile, path: Path) -> None:
        """Before anything in it is believed."""
        if self.checked is never or not file.checks or not path.is_file():
            return
        found = header_crc(path)
        if found != file.header_check:
            raise self._damaged(file, "its header", f"the check {found:08x}", f"{file.header_check:08x}")

    def _entry(self, key: str, what: str) -> Entry:
        layer = layer_of(key)
        header = self._header(layer)
        if f"{key}.{what}" not in header:
            raise InputError(f"{self.folder / self._file(layer).name} has no {key}.{what}: {AGAIN}")
        return header[f"{key}.{what}"]

    def _kept(self, key: str, entry: Entry) -> Tensor | None:
        """The bytes of a plane or a table, where they need not be read."""
        if self.shadow is None:
            return None
        return self.shadow.take(self.folder / self._file(layer_of(key)).name, entry.begin, entry.end)

    def _opened(self, key: str) -> "_Opened":
        return _Opened(self.folder / self._file(layer_of(key)).name)


def find_artefact(model_folder: Path) -> Artefact | None:
    """The any-precision copy beside a model, else the one that this node keeps; None where there is neither.

    Raises InputError for one of another version or of another model: a slot never serves with weights that are not the model's.
    """
    beside = model_folder / ANY_PRECISION_FOLDER
    if (beside / MANIFEST_FILE).is_file():
        return open_artefact(beside, model_folder)
    kept = cache_folder(model_digest(model_folder))
    if not (kept / MANIFEST_FILE).is_file():
        return None
    claim = claimed(kept)
    artefact = open_artefact(kept, model_folder)
    artefact.claim = claim
    return artefact


def open_artefact(folder: Path, model_folder: Path) -> Artefact:
    """The copy in `folder`. Raises InputError where it is absent, damaged, of another version or of another model."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(
            f"{folder} has no {MANIFEST_FILE}: it is no any-precision copy; run `strata quantize {model_folder}`"
        )
    digest = model_digest(model_folder)
    if manifest.model_digest != digest:
        raise InputError(
            f"{folder} was made of another model (digest {manifest.model_digest[:12]}, {model_folder} has {digest[:12]}): {AGAIN}, "
            "or remove the folder"
        )
    return Artefact(folder, manifest)


class _Opened:
    """A file that is read at positions."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fill(self, tensors: Sequence[Tensor], offset: int, *, checked: bool = False) -> tuple[int, ...] | None:
        """Contiguous tensors from neighbouring bytes: one call of the system where it gives all at once. checked: with the check of each."""
        left = [_bytes_of(tensor) for tensor in tensors]
        if checked:
            count, checks = native_crc.read_crc32(self._descriptor, left, offset)
            if count < sum(map(len, left)):
                raise self._cut_off(offset + count)
            return checks
        while left:
            count = os.preadv(self._descriptor, left, offset)
            if not count:
                raise self._cut_off(offset)
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
        return None

    def _cut_off(self, offset: int) -> InputError:
        return InputError(f"{self._path} ends at byte {offset}: it was cut off while it was read; {AGAIN}")

    def fill_columns(self, target: Tensor, offset: int, row_bytes: int, cut: Range) -> None:
        """`target` [rows, bytes]: the bytes `cut` of each row of a plane whose first wanted row begins at `offset`."""
        step = max(1, _STRIP_BYTES // row_bytes)
        for start in range(0, target.shape[0], step):
            strip = torch.empty(min(step, target.shape[0] - start), row_bytes, dtype=torch.uint8)
            self.fill([strip], offset + start * row_bytes)
            target[start : start + step] = strip[:, cut[0] : cut[1]]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    memory: memoryview = tensor.view(torch.uint8).view(-1).numpy().data
    return memory


def _byte_range(key: str, in_features: int, columns: Range | None) -> Range:
    """Where columns lie in a row of a plane."""
    first, last = columns or (0, in_features)
    if not 0 <= first < last <= in_features:
        raise InputError(f"{key}: columns {first}..{last} are not within its {in_features} inputs")
    if first % TILE_COLUMNS or (last % TILE_COLUMNS and last != in_features):
        raise InputError(
            f"{key}: columns {first}..{last} do not lie on tiles of {TILE_COLUMNS}: cut at multiples of {TILE_COLUMNS} or at the end, {in_features}"
        )
    return first // 8, plane_columns(last) // 8
