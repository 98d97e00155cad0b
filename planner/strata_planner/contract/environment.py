"""The environment that a slot's process is started with: libraries read it before any of our code runs.

Used by whoever starts slots: `strata up`, the operator's pods, benchmarks. What a user sets wins. Source: `mallopt(3)`, glibc manual "Memory Allocation
Tunables", libgomp manual "Environment Variables"; the figures are in docs/benchmarks.md, "Memory" and "Threads".
"""

from collections.abc import Mapping

SLOT_ENVIRONMENT: Mapping[str, str] = {
    # A tensor's memory is cut from a larger block, and the few bytes before it go to the thread's cache of small blocks. There they never join
    # their neighbours again: the hole that the tensor leaves is too small for the next one of its size.
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    # By itself MKL keeps up to 24 MiB for products in float32, another block for every few numbers of rows, and is no faster for it.
    "MKL_DISABLE_FAST_MM": "1",
    # Between the loops of a step a thread waits awake for some ten microseconds, then asleep. By itself libgomp waits awake for milliseconds: where another
    # program wants the core, every loop then waits for the thread that it has put aside.
    "GOMP_SPINCOUNT": "1000",
}
