"""Room for what a node keeps of the models that its loads quantize: a bound on all of it, and the least recently used go first.

Used by `load_cache`. Whoever uses a folder claims it (a shared lock, until its stage is let go), and no claimed folder is ever removed; nor is a copy that was
calibrated, which no load could make again. Knows no weights.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from strata_planner.contract.model_folder import Manifest
from strata_planner.contract.values import ContractError
from strata_runtime.errors import InputError

log = logging.getLogger(__name__)

LIMIT_VARIABLE = "STRATA_CACHE_LIMIT"
LIMIT_SHARE = 0.4  # of the disk, where no limit is set
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_QUANTITY = re.compile(r"(\d+)(|Ki|Mi|Gi|Ti)")


class Claim:
    """Holds a folder until this object is gone."""

    def __init__(self, folder: Path) -> None:
        """Waits while the folder is being removed. Raises OSError where there is no place for the lock."""
        descriptor = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT, 0o666)
        self._close = weakref.finalize(self, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)  # used now


def claimed(folder: Path) -> Claim | None:
    """None where nothing can be written: nobody could remove it either."""
    try:
        return Claim(folder)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder of the cache. `used`: when it was claimed last, in seconds."""

    folder: Path
    size_bytes: int
    used: float


def make_room(folder: Path, needed_bytes: int, short: Callable[[], bool]) -> None:
    """Before `needed_bytes` are added to `folder`: others go, the least recently used first, until the bound holds and the disk is not `short`.

    Raises OSError where that is not enough, InputError for a limit that is none.
    """
    kept = list(_found(folder.parent))
    limit = limit_bytes(folder.parent)
    total = needed_bytes + sum(each.size_bytes for each in kept)
    for each in sorted(kept, key=lambda one: (one.used, one.folder.name)):
        if total <= limit and not short():
            return
        if each.folder != folder and _removed(each.folder):
            log.info("%s is removed: %d MiB that were not used for longest", each.folder, each.size_bytes >> 20)
            total -= each.size_bytes
    if total > limit:
        raise OSError(
            f"{folder.parent} would keep {total >> 20} MiB, and {limit >> 20} MiB are allowed: set {LIMIT_VARIABLE} to more, as 200Gi"
        )


def limit_bytes(place: Path) -> int:
    """What all models may take. Raises InputError for a value that is no quantity."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return int(LIMIT_SHARE * shutil.disk_usage(place).total)
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise InputError(f"{LIMIT_VARIABLE}={text!r} is no number of bytes: write it as 200Gi, or 0 to keep nothing")
    return int(found[1]) * _UNITS[found[2]]


def _found(root: Path) -> Iterator[Kept]:
    """What loads could make again."""
    for folder in _entries(root):
        if folder.is_dir() and not folder.name.startswith(".") and not _is_calibrated(folder):
            with contextlib.suppress(OSError):  # another process removes it
                lock = _lock_of(folder)
                used = (lock if lock.exists() else folder).stat().st_mtime
                yield Kept(folder, sum(path.stat().st_size for path in _entries(folder)), used)


def _entries(folder: Path) -> Iterable[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_calibrated(folder: Path) -> bool:
    try:
        manifest = Manifest.of_folder(folder)
    except (ContractError, OSError):
        return False
    return manifest is not None and manifest.recipe.text_sha256 is not None


def _removed(folder: Path) -> bool:
    """Whether it could be: nobody uses it."""
    try:
        descriptor = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _lock_of(folder: Path) -> Path:
    """Beside it, and never removed: a lock on a file that is gone holds nobody off."""
    return folder.with_name(f".{folder.name}.lock")
