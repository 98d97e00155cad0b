"""Which model a folder holds, as one short string: ties what `strata quantize` wrote to the checkpoint that it was made of.

Called by whoever opens or writes an artefact. Cheap: it covers config.json, and of every safetensors file its name, its size, its header (names,
types, shapes and places of all tensors) and the 64 bytes in the middle of each tensor, so that two trainings of one architecture
differ; it does not cover the other weights: a checkpoint in which only those were edited keeps its digest.
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from strata_runtime.errors import InputError
from strata_runtime.kernels.native_crc import crc32
from strata_runtime.loading.checkpoint import Checkpoint

SAMPLE_BYTES = 64


def model_digest(folder: Path) -> str:
    """64 hexadecimal digits. Raises InputError where config.json or a file of the checkpoint is absent or damaged."""
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder} has no config.json; point at a Hugging Face model folder")
    return _digest(folder, tuple(_state(each) for each in (config, *map(folder.joinpath, Checkpoint(folder).files))))


def _state(file: Path) -> tuple[int, ...]:
    """Another one, where a file may hold something else; of one that is absent, whoever reads it says so."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=8)  # a load asks several times: for the copy, for what loads keep, for what is held
def _digest(folder: Path, states: tuple[tuple[int, ...], ...]) -> str:  # noqa: ARG001, the files as they are now
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    checkpoint = Checkpoint(folder)
    for name in checkpoint.files:
        header = checkpoint.header(name)
        data = min((entry.begin for entry in header.values()), default=0)
        file = os.open(folder / name, os.O_RDONLY)
        try:
            digest.update(f"{name} {os.fstat(file).st_size}\n".encode())
            digest.update(os.pread(file, data, 0))
            for entry in header.values():
                middle = (entry.begin + entry.end) // 2
                digest.update(os.pread(file, min(SAMPLE_BYTES, entry.end - middle), middle))
        finally:
            os.close(file)
    return digest.hexdigest()


def model_digest_here(folder: Path) -> str:
    """As `model_digest`, and of every file of the checkpoint when it was last changed: for what is kept unasked and must not outlive an
    edit that `model_digest` does not see. Another copy of the folder has another one. Raises as it does.
    """
    digest = hashlib.sha256(model_digest(folder).encode())
    for name in Checkpoint(folder).files:
        digest.update(f"{name} {(folder / name).stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path, chunk_bytes: int = 1 << 22) -> str:
    """Of the whole file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()


def crc_of(descriptor: int, begin: int, end: int, path: Path, chunk_bytes: int = 1 << 18) -> int:
    """CRC-32 of bytes begin..end-1 of an open file. Raises InputError where it ends before."""
    crc, chunk = 0, memoryview(bytearray(min(chunk_bytes, end - begin)))
    while begin < end:
        count = os.preadv(descriptor, [chunk[: end - begin]], begin)
        if not count:
            raise InputError(f"{path} ends at byte {begin}: it was cut off while it was read")
        crc = crc32(chunk[:count], crc)
        begin += count
    return crc


def header_crc(path: Path) -> int:
    """CRC-32 of a safetensors file up to its data, as far as the file goes."""
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        return crc_of(file.fileno(), 0, min(size, 8 + length), path)
