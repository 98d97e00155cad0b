"""Hidden states and gradients between the layers of a pass, kept on disk: a pass that is interrupted goes on where it stopped.

Used by `fisher` and by GPTQ's pass, under names of theirs. A file is there whole or not at all, and counts only for the run that it belongs to.
What cannot be written is held in memory, and so is all of it where another process has the folder. Knows no models.
"""

import contextlib
import fcntl
import logging
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

log = logging.getLogger(__name__)

FOLDER = ".calibration"  # in that of what is made
_LOCK, _ENDING, _MARK, _CHECK = "lock", ".safetensors", "mark", "check"


class KeptStates:
    """Lists of tensors by name. A context: at its end the folder is left for another run, unless `clear` was called.

    `folder` None: in memory alone. `mark`: what decides the states (model, text, arithmetic): those of another are removed.
    """

    def __init__(self, folder: Path | None = None, mark: str = "") -> None:
        self._folder = folder
        self._mark = mark
        self._memory: dict[str, list[Tensor]] = {}
        self._stack = contextlib.ExitStack()
        self._has_room = True

    def __enter__(self) -> Self:
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = self._stack.enter_context((self._folder / _LOCK).open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in self._folder.iterdir():
                    if path.name != _LOCK and not self._is_ours(path):
                        path.unlink()
            except OSError as error:
                self._said(error)
                self._folder = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def has(self, name: str) -> bool:
        return name in self._memory or (self._folder is not None and self._path(name).is_file())

    def put(self, name: str, tensors: Sequence[Tensor]) -> None:
        if self._folder is not None and self._has_room:
            held = {f"{place:06d}": tensor.contiguous().cpu() for place, tensor in enumerate(tensors)}
            path = self._path(name)
            scratch = path.with_name(f".{path.name}.partial")
            try:
                save_file(held, scratch, {_MARK: self._mark, _CHECK: str(_crc(held.values()))})
                scratch.replace(path)
            except (OSError, SafetensorError) as error:
                scratch.unlink(missing_ok=True)
                self._said(error)
                self._has_room = False
            else:
                return
        self._memory[name] = list(tensors)

    def get(self, name: str, device: torch.device) -> list[Tensor] | None:
        """None where it is not there, or damaged."""
        if name in self._memory:
            return self._memory[name]
        if self._folder is None:
            return None
        try:
            with safe_open(self._path(name), framework="pt") as file:
                tensors = [file.get_tensor(key) for key in sorted(file.keys())]
                whole = (file.metadata() or {}).get(_CHECK) == str(_crc(tensors))
        except (OSError, SafetensorError):
            return None
        return [tensor.to(device) for tensor in tensors] if whole else None

    def drop(self, *names: str) -> None:
        for name in names:
            self._memory.pop(name, None)
            if self._folder is not None:
                self._path(name).unlink(missing_ok=True)

    def clear(self) -> None:
        """What was made of it is finished."""
        self._memory.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / (name + _ENDING)

    def _is_ours(self, path: Path) -> bool:
        try:
            with safe_open(path, framework="pt") as file:
                return not path.name.startswith(".") and (file.metadata() or {}).get(_MARK) == self._mark
        except (OSError, SafetensorError):
            return False

    def _said(self, error: Exception) -> None:
        log.warning(
            "%s: states of the calibration stay in memory, an interrupted run begins it anew: %s", self._folder, error
        )


def _crc(tensors: Iterable[Tensor]) -> int:
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.view(torch.uint8).numpy().data, crc)
    return crc
