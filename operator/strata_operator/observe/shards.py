"""Whether a checkpoint's files are whole, read from their index and headers alone: found out before a plan, not by slots.

Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON header with each tensor's place, the data). Called
by `strata up` and by the operator where it sees the model's folder. The runtime checks again what it loads.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER_BYTES = 100_000_000  # as safetensors itself allows
_LENGTH_BYTES = 8
_CURE = "fetch the checkpoint again"


def has_checkpoint(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def shard_problems(folder: Path) -> Iterator[str]:
    """A sentence per file that is missing, cut off or lacks tensors. A folder without a checkpoint has no such problem."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            yield from _file_problems(folder / SINGLE, frozenset())
        return
    try:
        listed = json.loads((folder / INDEX).read_bytes())["weight_map"]
        wanted = _by_file(listed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield f"{folder / INDEX} is not a safetensors index ({type(error).__name__}: {error}): {_CURE}"
        return
    for name, keys in sorted(wanted.items()):
        if PurePath(name).name != name:
            yield f"{folder / INDEX} names {name!r}, which is not in this folder: {_CURE}"
        else:
            yield from _file_problems(folder / name, frozenset(keys))


def _by_file(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        found.setdefault(name, []).append(key)
    return found


def _file_problems(path: Path, keys: frozenset[str]) -> Iterator[str]:
    try:
        actual = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(actual, LONGEST_HEADER_BYTES):
                yield f"{path} is cut off or no safetensors file: {actual} bytes, its header should take {length}: {_CURE}"
                return
            header: dict[str, Any] = json.loads(file.read(length))
        tensors = {key: entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"}
        expected = _LENGTH_BYTES + length + max(tensors.values(), default=0)
    except FileNotFoundError:
        yield f"{path} is missing: {_CURE}"
        return
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        yield f"{path} has no readable header ({type(error).__name__}: {error}): {_CURE}"
        return
    if actual != expected:
        yield f"{path} has {actual} bytes where its header says {expected}, it was cut off or changed: {_CURE}"
    if absent := sorted(keys - tensors.keys()):
        yield f"{path} lacks {len(absent)} tensors that the index puts there, for instance {absent[0]}: {_CURE}"
