"""A safetensors checkpoint: which tensor lies in which file, whether the files are whole, and reading single tensors.

Used by `load_stage`. Files are opened only when one of their tensors is wanted, and closed again after each batch of
tensors, so that no file stays mapped. Knows no model. Format: https://huggingface.co/docs/safetensors (8 bytes of header
length, a JSON header with offsets, the data).
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from strata_runtime.errors import InputError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


class Checkpoint:
    """The tensors under one folder. `keys_read` names every tensor that has been read, in order."""

    def __init__(self, folder: Path) -> None:
        """Reads the index alone. Raises InputError where there is no safetensors checkpoint."""
        self.folder = folder
        self.keys_read: list[str] = []
        self._file_of = _files(folder)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def check(self, keys: Iterable[str]) -> None:
        """Before any byte of data is read: the files of `keys` are there, whole, and hold them. Raises InputError."""
        for name, wanted in self._by_file(keys).items():
            header = _checked_header(self.folder / name)
            absent = [key for key in wanted if key not in header]
            if absent:
                raise InputError(
                    f"{self.folder / name} lacks {len(absent)} tensors that the index puts there, for instance "
                    f"{absent[0]}: fetch the checkpoint again"
                )

    def read(self, keys: Iterable[str], dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors in memory of their own, floating-point ones in `dtype`."""
        tensors = {}
        for name, wanted in self._by_file(keys).items():
            with safe_open(self.folder / name, framework="pt", device="cpu") as file:
                for key in wanted:
                    mapped = file.get_slice(key)[...]
                    target = dtype if mapped.is_floating_point() else mapped.dtype
                    tensors[key] = mapped.to(device=device, dtype=target, copy=True)
                    self.keys_read.append(key)
        return tensors

    def _by_file(self, keys: Iterable[str]) -> dict[str, list[str]]:
        grouped = defaultdict(list)
        for key in keys:
            grouped[self._file_of[key]].append(key)
        return grouped


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
        header = _checked_header(folder / _SINGLE)
        return {key: _SINGLE for key in header if key != _METADATA}
    raise InputError(
        f"{folder} has neither {_INDEX} nor {_SINGLE}: only safetensors checkpoints are read; convert other formats first"
    )


def _checked_header(path: Path) -> dict[str, Any]:
    """The file's header, if the file is as long as it says."""
    if not path.is_file():
        raise InputError(f"shard {path} is missing: fetch the checkpoint again")
    actual = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > actual:
            raise InputError(
                f"shard {path} is truncated or no safetensors file: its header should take {length} bytes, the file "
                f"has {actual}: fetch it again"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise InputError(f"shard {path} has no readable header ({error}): fetch it again") from error
    data = max((entry["data_offsets"][1] for key, entry in header.items() if key != _METADATA), default=0)
    expected = _LENGTH_BYTES + length + data
    if actual != expected:
        raise InputError(
            f"shard {path} has {actual} bytes where its header says {expected}: it was cut off or changed; fetch it again"
        )
    return header
