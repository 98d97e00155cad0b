"""Builds the native library: every `*.cpp` of this folder into one shared object beside it, `python -m strata_runtime.kernels.native.build`.

Run by the hook of the package's build (`hatch_build.py`) and, in a checkout whose sources have changed, by `strata_runtime.kernels.native`. Needs a C++17
compiler (`$CXX`, g++, clang++ or c++) and nothing else: the sources include no header of torch or Python, and dispatch by processor at run time.
The object carries the digest of the sources it was made from. Imports the standard library alone: the hook runs where nothing is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "libstrata.so"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
)
LONGEST_SECONDS = 600


class BuildError(Exception):
    """The library cannot be built; the message says why and what to do. Whoever asked goes on with the reference kernels."""


def sources(folder: Path = FOLDER) -> list[Path]:
    return sorted((*folder.glob("*.cpp"), *folder.glob("*.h")))


def digest(folder: Path = FOLDER) -> str:
    """Of all that the object is made from: sources, flags and the machine's architecture."""
    found = hashlib.sha256(f"{FLAGS} {platform.machine()}".encode())
    for source in sources(folder):
        found.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return found.hexdigest()[:16]


def compiler() -> str | None:
    """$CXX where it is set, else the first C++ compiler on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def build(folder: Path = FOLDER) -> Path:
    """The library of `folder`'s sources, in it. Replaced in one move, so that whoever loads it at the same time gets a whole one."""
    found = compiler()
    if found is None:
        raise BuildError(
            "no C++ compiler (g++, clang++ or $CXX) is here; install one and run python -m strata_runtime.kernels.native.build"
        )
    target = folder / LIBRARY.name
    scratch = folder / f".{os.getpid()}.so"
    units = [str(source) for source in sources(folder) if source.suffix == ".cpp"]
    command = [found, *FLAGS, f'-DSTRATA_DIGEST="{digest(folder)}"', "-o", str(scratch), *units, "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)  # noqa: S603 -- the compiler found above
        if done.returncode:
            raise BuildError(f"{found} ended with {done.returncode}:\n{done.stderr.strip()[-4000:]}")
        scratch.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{found} cannot build {target}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return target


def main() -> int:
    try:
        built = build()
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"built {built}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
