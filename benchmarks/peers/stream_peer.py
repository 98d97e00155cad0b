"""What this memory gives at most: seconds of reading a buffer well beyond every cache, once, by as many threads as an engine has.

Asked like an engine, whatever the cell; its figure is the best of some sweeps, for other programs only add to them. Needs a C++ compiler, as the native library does.
"""

import ctypes
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.served import Engine, Moments, Wish, main

BYTES = 512 << 20
SWEEPS = 8
SOURCE = Path(__file__).with_name("sweep.cpp")
COMPILER = ("g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


def make(wish: Wish) -> Mapping[str, Engine]:
    library = wish.scratch / "sweep.so"
    if not library.exists():
        subprocess.run([*COMPILER, str(SOURCE), "-o", str(library)], check=True)
    sweep = ctypes.CDLL(str(library)).sweep
    sweep.argtypes, sweep.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_uint64
    data = np.ones(BYTES // 8, np.uint64)

    class Stream:
        def run(self, prompts: Sequence[Sequence[int]], answer: int) -> Moments:  # noqa: ARG002 -- the same for every cell
            best = min(self._once() for _ in range(SWEEPS))
            return Moments(best, best)

        def _once(self) -> float:
            started = time.perf_counter()
            total = sweep(data.ctypes.data, data.size, wish.threads)
            seconds = time.perf_counter() - started
            if total != data.size:
                raise RuntimeError(f"the sweep saw {total} of {data.size} words")
            return seconds

    return {"sweep": Stream()}


if __name__ == "__main__":
    main(make)
