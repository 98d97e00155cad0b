"""CRC-32 in the native library (`kernels/native/crc32.cpp`), the same as zlib's: of memory, and of what a file gives while it is read.

Called by `loading`, which compares it with what was noted. Where there is no library, or a processor that cannot multiply without carries, it is zlib's.
Both let other threads go on. Knows no files' formats.
"""

import ctypes
import os
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from strata_runtime.kernels import native

Bytes = bytes | bytearray | memoryview

_POINTER, _SIZE, _INT, _CHECK = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint32


def available() -> bool:
    """Whether the library takes checks here, many times as fast as zlib."""
    found = _library()
    return found is not None and bool(found.strata_has_crc32())


def crc32(data: Bytes, before: int = 0) -> int:
    """Of bytes that follow those whose check is `before`."""
    if not available():
        return zlib.crc32(data, before)
    library = _library()
    assert library is not None
    memory = np.frombuffer(data, np.uint8)
    return int(library.strata_crc32(before, memory.ctypes.data, memory.size))


def read_crc32(descriptor: int, pieces: Sequence[memoryview], offset: int) -> tuple[int, tuple[int, ...]]:
    """Fills `pieces` one after the other from neighbouring bytes of an open file: how many bytes there were, fewer only where it ends, and the check of
    each piece. Bytes are checked while they are in the processor's cache. Where `available()`. Raises OSError.
    """
    library = _library()
    assert library is not None
    count = len(pieces)
    memory = [np.frombuffer(piece, np.uint8) for piece in pieces]
    assert all(each.flags.writeable for each in memory)
    places = (_POINTER * count)(*(each.ctypes.data for each in memory))
    sizes = (_SIZE * count)(*(each.size for each in memory))
    checks = (_CHECK * count)()
    read = library.strata_read_crc32(descriptor, offset, count, places, sizes, checks)
    if read < 0:
        raise OSError(-read, os.strerror(-read))
    return read, tuple(checks)


@cache
def _library() -> ctypes.CDLL | None:
    found = native.library()
    if found is not None:
        found.strata_has_crc32.argtypes, found.strata_has_crc32.restype = [], _INT
        found.strata_crc32.argtypes, found.strata_crc32.restype = [_CHECK, _POINTER, _SIZE], _CHECK
        found.strata_read_crc32.restype = _SIZE
        found.strata_read_crc32.argtypes = [
            *(_INT, _SIZE, _INT),
            *(ctypes.POINTER(_POINTER), ctypes.POINTER(_SIZE), ctypes.POINTER(_CHECK)),
        ]
    return found
