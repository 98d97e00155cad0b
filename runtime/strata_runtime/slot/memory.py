"""What a process really holds: read from the kernel, for slots' status and for benchmarks."""

from pathlib import Path

_ROLLUP = Path("/proc/self/smaps_rollup")


def private_bytes(rollup: Path = _ROLLUP) -> int:
    """Private memory that a process has written: what only its end or its own doing frees. Pages of mapped files that the
    system can drop are not counted. 0 where the kernel does not tell (not Linux).
    """
    try:
        lines = rollup.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))
