"""Pages of mapped files that a process has read and need not keep: given back to the page cache, whence a next reading takes them.

Called by the launcher and by a slot once they have imported everything. Linking libraries and running their constructors reads hundreds of megabytes of
them, which would count as the process' own for good. Linux alone; elsewhere nothing happens. Flags: madvise(2); the list: proc_pid_smaps(5).
"""

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")
_DONT_NEED = 4
_HEAD = re.compile(r"(?P<begin>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<flags>\S{4}) \S+ \S+ (?P<inode>\d+)")


def drop_file_pages() -> None:
    """Where a page is the file's own, and nobody can have written to it, nothing is lost: whoever reads it again finds it."""
    if sys.platform != "linux":
        return
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:
        return
    advise = ctypes.CDLL(None).madvise
    for begin, end in unwritten(lines):
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)


def unwritten(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Begin and end of the mappings of files that cannot be written to and of which no page was, as by relocations before it was closed for writing."""
    mapping: re.Match[str] | None = None
    for line in smaps:
        mapping = _HEAD.match(line) or mapping
        closed = mapping is not None and "w" not in mapping["flags"] and mapping["inode"] != "0"
        if mapping and closed and line.startswith("Anonymous:") and int(line.split()[1]) == 0:
            yield int(mapping["begin"], 16), int(mapping["end"], 16)
