"""Which kernel of a format is the fastest on a device for so many tokens, as `strata_runtime.measuring.measure` has timed it there.

Asked by `kernels.select` on every forward pass. Where nothing was measured for exactly this processor, torch, native library, number of threads and
compute type, or this GPU by name and capability, torch, Triton, humming-kernels and compute type, the limits that the kernels themselves name
decide. Knows nothing of how kernels multiply.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from itertools import pairwise
from math import isqrt
from pathlib import Path

import torch

from strata_planner.contract.formats import FormatName
from strata_planner.contract.store import cache_folder, write_whole
from strata_runtime.device import gpu_libraries, processor_name
from strata_runtime.kernels.native import build

VERSION = 1  # of the file: raised when it changes its meaning
TOKEN_COUNTS = (1, 4, 16, 64, 256)  # that are timed
CPU = torch.device("cpu")

Steps = tuple[tuple[int, str], ...]  # (up to so many tokens, this kernel), ascending; the last one also beyond


def steps_of(seconds: Mapping[str, Mapping[int, float]]) -> Steps:
    """From seconds by kernel and number of tokens: the fastest each, borders half-way (geometrically) between the numbers that were timed."""
    counts = sorted(next(iter(seconds.values())))
    fastest = [min(seconds, key=lambda name: seconds[name][count]) for count in counts]
    borders = [isqrt(count * following) for count, following in pairwise(counts)]
    steps = list(zip([*borders, counts[-1]], fastest, strict=True))
    return tuple(step for place, step in enumerate(steps) if place + 1 == len(steps) or steps[place + 1][1] != step[1])


def fastest(format_name: FormatName, dtype: torch.dtype, count: int, device: torch.device = CPU) -> str | None:
    """The name of a kernel, or None where none was measured."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    steps = _kept(dtype, device, threads).get(format_name)
    return next((name for most, name in steps if count <= most), steps[-1][1]) if steps else None


def steps_on_cpu(dtype: torch.dtype, threads: int) -> dict[str, Steps]:
    """By format, of this processor with so many threads; empty where nothing was measured."""
    return dict(_kept(dtype, CPU, threads))


def save(found: Mapping[FormatName, Steps], dtype: torch.dtype, device: torch.device = CPU) -> Path:
    """Replaces what was kept for the device (a processor with this process' number of threads), in one move; this process chooses by it at once."""
    file, key = _place(dtype, device, torch.get_num_threads())
    write_whole(file, json.dumps({"key": key, "steps": found}, indent=1).encode())
    _kept.cache_clear()
    return file


@cache
def _kept(dtype: torch.dtype, device: torch.device, threads: int) -> dict[str, Steps]:
    """What was kept for exactly this device; nothing if the file is not there, is of another version or does not read."""
    if device.type not in {"cpu", "cuda"}:
        return {}
    file, key = _place(dtype, device, threads)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] != key:
            return {}
        return {
            name: tuple((int(most), str(kernel)) for most, kernel in steps) for name, steps in kept["steps"].items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _place(dtype: torch.dtype, device: torch.device, threads: int) -> tuple[Path, dict[str, object]]:
    """The file of a device, and all that would make another measurement differ."""
    key: dict[str, object] = {
        "version": VERSION,
        "torch": metadata.version("torch"),
        "computeType": str(dtype).removeprefix("torch."),
    }
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        key |= {"gpu": torch.cuda.get_device_name(device), "capability": capability} | gpu_libraries()
        name, ending = f"{key['gpu']} {capability}", ""
    else:
        key |= {"processor": processor_name(), "library": build.digest(), "threads": threads}
        name, ending = str(key["processor"]), f"-{threads}"
    digest = hashlib.sha256(f"{name} {key['computeType']}".encode()).hexdigest()[:12]
    return cache_folder() / f"kernels-{digest}{ending}.json", key
