"""The native library: kernels in C++ behind a plain C interface, loaded by ctypes.

`library()` is what wrappers call; without a library (no compiler at install, another architecture) it gives None and they take the reference in torch.
Sources are the `*.cpp` of this folder (see `build`); each wrapper declares the functions that it calls. Knows nothing of what they compute.
"""

import ctypes
import fcntl
import logging
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The library of exactly these sources, or None. A checkout whose sources have changed is built anew first: seconds, once."""
    from strata_runtime.kernels.native import build  # noqa: PLC0415 -- `python -m` runs that module, which nothing may have imported before

    found = _load(build.LIBRARY, build.digest())
    in_checkout = (build.FOLDER.parents[3] / "pyproject.toml").is_file()
    if found is None and in_checkout and build.compiler():
        found = _rebuilt()
    if found is None:
        log.info(
            "no native library: reference kernels are used; python -m strata_runtime.kernels.native.build makes one"
        )
    return found


@cache
def level() -> str | None:
    """Which of its paths the library takes on this processor: "avx512" (with BF16, VBMI, VNNI, and GFNI, see `cpu.h`), "avx2" or "portable"; None: it is not
    here.
    """
    found = library()
    if found is None:
        return None
    found.strata_cpu_level.restype = ctypes.c_char_p
    return bytes(found.strata_cpu_level()).decode()


def multiplies_in_avx512() -> bool:
    """Whether the library is here and this processor has all that its widest kernels take."""
    return level() == "avx512"


def _rebuilt() -> ctypes.CDLL | None:
    """One process builds, the others wait for it and load what it made."""
    from strata_runtime.kernels.native import build  # noqa: PLC0415 -- as above

    with (build.FOLDER / "build.py").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _load(build.LIBRARY, build.digest())
        if found is not None:
            return found
        try:
            return _load(build.build(), build.digest())
        except build.BuildError as error:
            log.warning("the native library cannot be built: %s", error)
            return None


def _load(path: Path, digest: str) -> ctypes.CDLL | None:
    """The library if it is there, holds this digest of its sources and loads here.

    The file is searched, since a library once loaded would be given again for its name after it has been built anew.
    """
    try:
        return ctypes.CDLL(str(path)) if digest.encode() in path.read_bytes() else None
    except OSError:
        return None
