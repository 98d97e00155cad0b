"""What tells one model from others, for figures that are kept of it from run to run. Used by `local.acceptance`.

Of a folder: config.json, and of each safetensors file its name, its size and some bytes at its begin, middle and end, so that two trainings of one
architecture differ. Of the hub: the uri, once it names a commit.
"""

import hashlib
import re
from pathlib import Path

from strata_operator.observe.model_files import local_folder

_SAMPLE_BYTES = 4096
_COMMIT = re.compile(r"hf://.+@[0-9a-f]{40}")


def model_identity(uri: str) -> str | None:
    """Hexadecimal digits; None where nothing can be told from here."""
    if _COMMIT.fullmatch(uri):
        return hashlib.sha256(uri.encode()).hexdigest()
    if not uri.startswith("file://"):
        return None
    try:
        return _of_folder(local_folder(uri))
    except OSError:
        return None


def _of_folder(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
