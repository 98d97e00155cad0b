"""A safetensors checkpoint: which tensor lies in which file, whether the files are whole, and reading single tensors.

Used by `load_stage`. Only the bytes of wanted tensors are read, straight into memory of their own: a mapped file would
count as the slot's memory while it streams. Knows no model. Format: https://huggingface.co/docs/safetensors (8 bytes of
header length, a JSON header with each tensor's type, shape and offsets, the data).
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch

from strata_runtime.errors import InputError
from strata_runtime.loading.shadow import Place, Shadow
from strata_runtime.ranges import Range, Ranges, rows_in

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 100_000_000  # safetensors' own bound
_METADATA = "__metadata__"
_STRIP = 1 << 15  # values converted at once: small enough that torch starts no threads of its own for the reading one
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
_SCALED = frozenset({torch.float8_e4m3fn})  # values only together with scales: never converted here


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: bytes begin..end-1 of its file."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def rows(self, first: int, last: int) -> "Entry":
        """Rows first..last-1 of it: they lie one after the other."""
        size = (self.end - self.begin) // self.shape[0]
        return Entry(self.type, (last - first, *self.shape[1:]), self.begin + first * size, self.begin + last * size)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor, or one entry of its first dimension."""

    name: str
    index: int | None = None


class Checkpoint:
    """The tensors under one folder. `keys_read` names every tensor that has been read, in order.

    `pinned`: what is read lies in page-locked memory, from which copies to a GPU run beside other work. `transposed`: names of matrices
    that are turned round as they are read. `shadow`: whole tensors that are there are taken, not read.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the index alone. Raises InputError where there is no safetensors checkpoint."""
        self.folder = folder
        self.keys_read: list[str] = []
        self.pinned = False
        self.transposed: frozenset[str] = frozenset()
        self.shadow: Shadow | None = None
        self._headers: dict[str, dict[str, Entry]] = {}
        self._file_of = _files(folder)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the safetensors files, sorted."""
        return tuple(sorted(set(self._file_of.values())))

    def check(self, keys: Iterable[str]) -> None:
        """Before any byte of data is read: the files of `keys` are there, whole, and hold them. Raises InputError."""
        for name, wanted in self._by_file(keys).items():
            header = self.header(name)
            absent = [key for key in wanted if key not in header]
            if absent:
                raise InputError(
                    f"{self.folder / name} lacks {len(absent)} tensors that the index puts there, for instance "
                    f"{absent[0]}: fetch the checkpoint again"
                )

    def read(self, keys: Iterable[str], dtype: torch.dtype | None, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors in memory of their own, floating-point ones in `dtype`; None: in the type that they are stored in."""
        tensors = {}
        for name, wanted in self._by_file(keys).items():
            header = self.header(name)
            with FileIO(self.folder / name) as file:
                for key in wanted:
                    read = self._kept(key, dtype)
                    read = _read(file, key, header[key], dtype, pinned=self.pinned) if read is None else read
                    tensors[key] = (read.mT.contiguous() if key in self.transposed else read).to(device)
                    self.keys_read.append(key)
        return tensors

    def shape(self, stored: str) -> tuple[int, ...]:
        """Of a tensor, as its file's header says."""
        return self.header(self._file_of[stored])[stored].shape

    def size_bytes(self, key: str, dtype: torch.dtype | None) -> int:
        """Of a floating-point tensor that is read in `dtype`; None: as it is stored."""
        entry = self.header(self._file_of[key])[key]
        return prod(entry.shape) * dtype.itemsize if dtype else entry.end - entry.begin

    def read_into(self, key: str, dtype: torch.dtype | None, memory: torch.Tensor) -> torch.Tensor:
        """One floating-point tensor in `dtype` (None: as it is stored), in `memory` (uint8 [bytes]) if it fits there, else in its own."""
        if key in self.transposed:
            return self.read([key], dtype, torch.device("cpu"))[key]
        name = self._file_of[key]
        entry = self.header(name)[key]
        self.keys_read.append(key)
        fits = self.size_bytes(key, dtype) <= memory.numel()
        with FileIO(self.folder / name) as file:
            kept = self._kept(key, dtype)
            return (
                _read(file, key, entry, dtype, pinned=False, memory=memory if fits else None) if kept is None else kept
            )

    def read_part(
        self, key: str, dtype: torch.dtype | None, rows: Ranges | None, columns: Range | None = None
    ) -> torch.Tensor:
        """Some rows (of a vector: items; of all experts: experts) and some columns of one floating-point tensor, in `dtype` (None: as it is stored);
        None: all.

        Only the bytes of those rows are read, strip by strip where columns are cut out of them.
        """
        name = self._file_of[key]
        entry = self.header(name)[key]
        self.keys_read.append(key)
        with FileIO(self.folder / name) as file:
            if key in self.transposed:
                whole = _read(file, key, entry, dtype, pinned=False).mT
                return rows_in(whole[_columns(entry, columns)], rows).contiguous()
            if columns is None and rows is not None and len(rows) == 1:
                return _read(file, key, entry.rows(*rows[0]), dtype, pinned=self.pinned)
            strips = _strips(entry, rows or ((0, entry.shape[0]),))
            read = (_read(file, key, strip, dtype, pinned=False)[_columns(entry, columns)] for strip in strips)
            first = next(read)
            part = torch.empty(
                sum(strip.shape[0] for strip in strips), *first.shape[1:], dtype=first.dtype, pin_memory=self.pinned
            )
            done = 0
            for strip in itertools.chain([first], read):
                part[done : done + len(strip)] = strip
                done += len(strip)
            return part

    def read_rows(self, places: Sequence[TensorPlace], dtype: torch.dtype) -> torch.Tensor:
        """Floating-point matrices of one width, one below the other, in `dtype`, in one piece of memory. One that is turned round comes alone."""
        entries = [self._entry_of(place) for place in places]
        counts = [prod(entry.shape) for entry in entries]
        memory = torch.empty(sum(counts) * dtype.itemsize, dtype=torch.uint8, pin_memory=self.pinned)
        left = memory
        turned = {place.name in self.transposed for place in places}
        for place, entry, count in zip(places, entries, counts, strict=True):
            kept = self._kept(place.name, dtype) if place.index is None else None
            if kept is not None:
                left[: kept.nbytes].view(dtype).copy_(kept.view(-1))
            else:
                with FileIO(self.folder / self._file_of[place.name]) as file:
                    _read(file, place.name, entry, dtype, pinned=False, memory=left)
            self.keys_read.append(place.name)
            left = left[count * dtype.itemsize :]
        read = memory.view(dtype).view(-1, entries[0].shape[-1])
        assert len(turned) == 1, places
        return read.mT.contiguous() if turned == {True} else read

    def places(self, key: str) -> list[Place]:
        """Where what is read for `key` lies, whole tensors; of a name that is none of a stored tensor nothing. Raises InputError as `header` does."""
        stored = [name for name in self.stored_names(key) if name in self._file_of]
        entries = [(self.folder / self._file_of[name], self.header(self._file_of[name])[name]) for name in stored]
        return [Place(file, entry.begin, entry.end) for file, entry in entries]

    def stored_names(self, key: str) -> Iterable[str]:
        """The tensors that are read for `key`."""
        return (key,)

    def _kept(self, key: str, dtype: torch.dtype | None) -> torch.Tensor | None:
        """A tensor that need not be read, in its stored type's own memory where that is the wanted one."""
        if self.shadow is None:
            return None
        name = self._file_of[key]
        entry = self.header(name)[key]
        stored, wanted = _types(self.folder / name, key, entry, dtype)
        kept = self.shadow.take(self.folder / name, entry.begin, entry.end)
        return None if kept is None else kept.view(stored).to(wanted).view(entry.shape)

    def _entry_of(self, place: TensorPlace) -> Entry:
        entry = self.header(self._file_of[place.name])[place.name]
        if place.index is None:
            return entry
        size = (entry.end - entry.begin) // entry.shape[0]
        begin = entry.begin + place.index * size
        return Entry(entry.type, entry.shape[1:], begin, begin + size)

    def header(self, name: str) -> dict[str, Entry]:
        """What a file holds, in the order of its header. Raises InputError if the file is absent, cut off or unreadable."""
        if name not in self._headers:
            self._headers[name] = checked_header(self.folder / name)
        return self._headers[name]

    def _by_file(self, keys: Iterable[str]) -> dict[str, list[str]]:
        grouped = defaultdict(list)
        for key in keys:
            grouped[self._file_of[key]].append(key)
        return grouped


def _strips(entry: Entry, rows: Ranges) -> list[Entry]:
    """The rows of a tensor in few at a time."""
    step = max(1, _STRIP // prod(entry.shape[1:]))
    return [entry.rows(begin, min(begin + step, last)) for first, last in rows for begin in range(first, last, step)]


def _columns(entry: Entry, columns: Range | None) -> tuple[slice, ...]:
    return (slice(None), _slice(columns))[: len(entry.shape)]


def _slice(part: Range | None) -> slice:
    return slice(*part) if part else slice(None)


def _files(folder: Path) -> dict[str, str]:
    """Tensor -> name of its file, from the index, or from the header of a checkpoint that is one file."""
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise InputError(f"{index} is not a safetensors index ({error}): fetch the checkpoint again") from error
        return weight_map
    if (folder / _SINGLE).is_file():
        header = checked_header(folder / _SINGLE)
        return dict.fromkeys(header, _SINGLE)
    raise InputError(
        f"{folder} has neither {_INDEX} nor {_SINGLE}: only safetensors checkpoints are read; convert other formats first"
    )


def checked_header(path: Path, cure: str = "fetch the checkpoint again") -> dict[str, Entry]:
    """The file's header, if the file is as long as it says. `cure`: what an InputError says to do."""
    if not path.is_file():
        raise InputError(f"{path} is missing: {cure}")
    actual = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(actual, _LARGEST_HEADER_BYTES):
            raise InputError(
                f"{path} is truncated or no safetensors file: its header should take {length} bytes, the file has {actual} and a "
                f"header at most {_LARGEST_HEADER_BYTES}: {cure}"
            )
        try:
            listed = json.loads(file.read(length))
            header = {key: _entry(value, _LENGTH_BYTES + length) for key, value in listed.items() if key != _METADATA}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} has no readable header ({error}): {cure}") from error
    expected = max((entry.end for entry in header.values()), default=_LENGTH_BYTES + length)
    if actual != expected:
        raise InputError(
            f"{path} has {actual} bytes where its header says {expected}, it was cut off or changed: {cure}"
        )
    return header


def _entry(value: dict[str, Any], data: int) -> Entry:
    begin, end = value["data_offsets"]
    return Entry(value["dtype"], tuple(value["shape"]), data + begin, data + end)


def read_entry(file: FileIO, key: str, entry: Entry) -> torch.Tensor:
    """A tensor of an open file, as it is stored, in memory of its own."""
    return _read(file, key, entry, None, pinned=False)


def _read(
    file: FileIO,
    key: str,
    entry: Entry,
    dtype: torch.dtype | None,
    *,
    pinned: bool,
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    """Other types are converted strip by strip: a tensor is never there twice."""
    stored, wanted = _types(file.name, key, entry, dtype)
    count = prod(entry.shape)
    if memory is None:
        flat = torch.empty(count, dtype=wanted, pin_memory=pinned)
    else:
        flat = memory[: count * wanted.itemsize].view(wanted)
    file.seek(entry.begin)
    if wanted == stored:
        _fill(file, key, flat)
        return flat.view(entry.shape)
    strip = torch.empty(min(count, _STRIP), dtype=stored)
    for start in range(0, count, _STRIP):
        part = strip[: count - start]
        _fill(file, key, part)
        flat[start : start + _STRIP] = part
    return flat.view(entry.shape)


def _types(file: Any, key: str, entry: Entry, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """That a tensor is stored in, and that it is wanted in. Raises InputError for one that nobody can read so."""
    if entry.type not in _TYPES:
        raise InputError(f"{file}: tensor {key} has type {entry.type}; readable are {', '.join(_TYPES)}")
    stored = _TYPES[entry.type]
    if prod(entry.shape) * stored.itemsize != entry.end - entry.begin:
        raise InputError(f"{file}: tensor {key} of {entry.shape} takes {entry.end - entry.begin} bytes: damaged file")
    wanted = dtype if dtype and stored.is_floating_point else stored
    if stored in _SCALED and wanted != stored:
        raise InputError(
            f"{file}: tensor {key} is of type {entry.type}, and nothing says by which scales it is read: config.json needs the "
            "quantization_config that belongs to it"
        )
    return stored, wanted


def _fill(file: FileIO, key: str, flat: torch.Tensor) -> None:
    target: memoryview = flat.view(torch.uint8).numpy().data
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise InputError(f"{file.name} ends within tensor {key}: it was cut off while it was read; fetch it again")
        done += count
