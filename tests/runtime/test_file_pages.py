"""Pages of mapped files: which are given back, and that nothing is lost with them."""

import mmap
from pathlib import Path

import pytest

from strata_runtime import file_pages

SMAPS = """\
1000-3000 r-xp 00000000 08:01 17                         /lib/code.so
Rss:                   8 kB
Anonymous:             0 kB
3000-4000 r--p 00002000 08:01 17                         /lib/code.so
Rss:                   4 kB
Anonymous:             4 kB
4000-5000 rw-p 00003000 08:01 17                         /lib/code.so
Rss:                   0 kB
Anonymous:             0 kB
5000-6000 rw-p 00000000 00:00 0                          [heap]
Rss:                   4 kB
Anonymous:             4 kB
6000-7000 r--p 00000000 00:00 0                          [vvar]
Rss:                   0 kB
Anonymous:             0 kB
7000-9000 r--s 00000000 08:01 18                         /data/table
Rss:                   8 kB
Anonymous:             0 kB
"""


def test_pages_that_were_written_are_kept() -> None:
    """Relocated addresses are in no file."""
    assert [*file_pages.unwritten(SMAPS.splitlines())] == [(0x1000, 0x3000), (0x7000, 0x9000)]


def test_what_is_dropped_is_read_again(tmp_path: Path) -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("the kernel lists no mappings")
    file = tmp_path / "table"
    file.write_bytes(bytes(range(256)) * 4096)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = bytes(mapped)
        assert _resident(file) > 0
        file_pages.drop_file_pages()
        assert _resident(file) == 0
        assert bytes(mapped) == before


def _resident(file: Path) -> int:
    """Kilobytes of the file that this process has mapped and read."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.endswith(str(file)))
    (line,) = [line for line in lines[place:] if line.startswith("Rss:")][:1]
    return int(line.split()[1])
