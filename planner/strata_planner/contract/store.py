"""Where this user's machine keeps what was worked out once, and how a file is replaced: whole, or not at all.

Used by the runtime and the command line: both write files that other processes read at any time. Knows nothing of what the files hold.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/strata`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "strata")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, hidden beside `path`, that takes its place in one move when the block ends; nothing is left of it when the block fails.

    Two processes that write at once each have a file of their own, and the last one stays. Folders above are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """`mode`: who may read it, from its first byte on; less what the process' umask takes."""
    with replacing(path) as scratch, open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:  # noqa: PTH123 -- takes no mode
        file.write(content)
