"""A 16-bit checkpoint as arrays, for the peers that have numpy and no torch."""

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def config_of(folder: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Names and values of all bfloat16 tensors, in float32. The format: github.com/huggingface/safetensors."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        begin = 8 + int.from_bytes(mapped[:8], "little")
        header: dict[str, Any] = json.loads(mapped[8:begin])
        for name, told in header.items():
            if name != "__metadata__":
                yield name, _read(mapped, begin, name, told)


def _read(mapped: mmap.mmap, begin: int, name: str, told: Mapping[str, Any]) -> Array:
    if told["dtype"] != "BF16":
        raise ValueError(f"{name} is {told['dtype']}: only checkpoints in BF16 are read; write the model in bfloat16")
    start, end = told["data_offsets"]
    halves = np.frombuffer(mapped, np.uint16, (end - start) // 2, begin + start)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(told["shape"])
