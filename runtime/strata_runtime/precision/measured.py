"""Which kernel of a format is the fastest on this machine for so many tokens, as `strata_runtime.measure` has timed it.

Asked by `kernels.select` on every forward pass of a processor; where nothing was measured for this processor, torch, library, number of threads and
compute type, the limits that the kernels themselves name decide. Knows nothing of how kernels multiply.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from itertools import pairwise
from math import isqrt
from pathlib import Path

import torch

from strata_planner.contract.formats import FormatName
from strata_runtime.measure import processor_name
from strata_runtime.native import build

VERSION = 1  # of the file: raised when it changes its meaning
TOKEN_COUNTS = (1, 4, 16, 64, 256)  # that are timed

Steps = tuple[tuple[int, str], ...]  # (up to so many tokens, this kernel), ascending; the last one also beyond


def steps_of(seconds: Mapping[str, Mapping[int, float]]) -> Steps:
    """From seconds by kernel and number of tokens: the fastest each, borders half-way (geometrically) between the numbers that were timed."""
    counts = sorted(next(iter(seconds.values())))
    fastest = [min(seconds, key=lambda name: seconds[name][count]) for count in counts]
    borders = [isqrt(count * following) for count, following in pairwise(counts)]
    steps = list(zip([*borders, counts[-1]], fastest, strict=True))
    return tuple(step for place, step in enumerate(steps) if place + 1 == len(steps) or steps[place + 1][1] != step[1])


def fastest(format_name: FormatName, dtype: torch.dtype, count: int) -> str | None:
    """The name of a kernel, or None where none was measured."""
    steps = _kept(dtype, torch.get_num_threads()).get(format_name)
    return next((name for most, name in steps if count <= most), steps[-1][1]) if steps else None


def save(found: Mapping[FormatName, Steps], dtype: torch.dtype, threads: int) -> Path:
    """Replaces what was kept, in one move; this process chooses by it at once."""
    file, key = _place(dtype, threads)
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps({"key": key, "steps": found}, indent=1), encoding="utf-8")
    scratch.replace(file)
    _kept.cache_clear()
    return file


@cache
def _kept(dtype: torch.dtype, threads: int) -> dict[str, Steps]:
    """What was kept for exactly this machine; nothing if the file is not there, is of another version or does not read."""
    file, key = _place(dtype, threads)
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] != key:
            return {}
        return {
            name: tuple((int(most), str(kernel)) for most, kernel in steps) for name, steps in kept["steps"].items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _place(dtype: torch.dtype, threads: int) -> tuple[Path, dict[str, object]]:
    key: dict[str, object] = {
        "version": VERSION,
        "torch": metadata.version("torch"),
        "processor": processor_name(),
        "library": build.digest(),
        "computeType": str(dtype).removeprefix("torch."),
        "threads": threads,
    }
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(f"{key['processor']} {key['computeType']}".encode()).hexdigest()[:12]
    return base / "strata" / f"kernels-{digest}-{threads}.json", key
