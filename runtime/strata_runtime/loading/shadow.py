"""Tensors of a model's files that a slot keeps in host memory, unused until a load takes them: what `contract.shadows` orders.

Filled by `slot.shadowing`, asked by whoever reads a checkpoint or an any-precision copy while a stage loads. A tensor is known by its place in a file and by what
the file was when it was read: of one that has changed since nothing is given. What is given is the caller's alone, and is kept no more. Safe for several threads.
"""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

FileState = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes begin..end-1 of a file."""

    file: Path
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class _Kept:
    """`flat`: uint8 [bytes]; `layer`: None outside of all layers."""

    flat: Tensor
    state: FileState
    layer: int | None


class Shadow:
    """`given_bytes`: that loads have taken since it began."""

    def __init__(self) -> None:
        self.given_bytes = 0
        self._kept: dict[Place, _Kept] = {}
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(place.size_bytes for place in self._kept)

    def has(self, place: Place) -> bool:
        """Of the file as it is now."""
        kept = self._kept.get(place)
        return kept is not None and kept.state == file_state(place.file)

    def put(self, place: Place, flat: Tensor, state: FileState, layer: int | None) -> None:
        """`flat`: uint8 [bytes], of nobody else; `state`: of the file before it was read."""
        with self._lock:
            self._kept[place] = _Kept(flat, state, layer)

    def take(self, file: Path, begin: int, end: int) -> Tensor | None:
        """uint8 [bytes], the caller's own from now on; None: it is not here, or not what the file has now."""
        with self._lock:
            kept = self._kept.pop(Place(file, begin, end), None)
        if kept is None or kept.state != file_state(file):
            return None
        with self._lock:
            self.given_bytes += end - begin
        return kept.flat

    def keep(self, wanted: Collection[Place]) -> None:
        """Lets go of all others."""
        self._drop(lambda place, _: place not in wanted)

    def keep_layers(self, layers: Collection[int | None]) -> None:
        """Lets go of what belongs to no such layer; None: what lies outside of all."""
        self._drop(lambda _, layer: layer not in layers)

    def clear(self) -> None:
        self._drop(lambda _, __: True)

    def _drop(self, is_over: Callable[[Place, int | None], bool]) -> None:
        with self._lock:
            over = [place for place, kept in self._kept.items() if is_over(place, kept.layer)]
            for place in over:
                del self._kept[place]


def file_state(file: Path) -> FileState:
    """Another one where the file may hold something else; empty where it is not there."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
