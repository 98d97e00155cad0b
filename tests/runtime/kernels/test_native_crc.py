"""Checks of the native library are zlib's, on every path that this processor has: of any length, at any place in memory, in one or in many parts."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from strata_runtime.kernels import native_crc
from strata_runtime.kernels.native import library
from tests.laws import share

MOST_BYTES = 1 << 20
LENGTHS = st.integers(0, 700) | st.integers(0, MOST_BYTES // 4)
ANY_FIXTURE = [HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def noise() -> memoryview:
    return memoryview(np.random.default_rng(0).bytes(MOST_BYTES))


@pytest.fixture(scope="module")
def file(noise: memoryview, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path: Path = tmp_path_factory.mktemp("crc") / "noise"
    path.write_bytes(noise)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@settings(deadline=None, max_examples=share(60), suppress_health_check=ANY_FIXTURE)
@given(begin=st.integers(0, 130), length=LENGTHS, before=st.integers(0, 2**32 - 1))
@example(begin=1, length=MOST_BYTES - 1, before=0)
def test_a_check_is_that_of_zlib(noise: memoryview, level: str, begin: int, length: int, before: int) -> None:
    data = noise[begin : begin + length]
    assert native_crc.crc32(data, before) == zlib.crc32(data, before)


@settings(deadline=None, max_examples=5, suppress_health_check=ANY_FIXTURE)
@given(begin=st.integers(0, 63))
def test_short_ones_of_every_length_too(noise: memoryview, level: str, begin: int) -> None:
    for length in range(600):
        data = noise[begin : begin + length]
        assert native_crc.crc32(data) == zlib.crc32(data), length


@settings(deadline=None, max_examples=share(30), suppress_health_check=ANY_FIXTURE)
@given(offset=st.integers(0, 5000), lengths=st.lists(LENGTHS, max_size=6), begin=st.integers(0, 64))
@example(offset=MOST_BYTES - 1000, lengths=[600, 0, 600, 5], begin=3)
def test_what_a_file_gives_comes_with_its_checks(
    noise: memoryview, file: int, level: str, offset: int, lengths: list[int], begin: int
) -> None:
    """Up to its end."""
    if not native_crc.available():
        return  # callers read with zlib
    pieces = [memoryview(bytearray(begin + length))[begin:] for length in lengths]
    read, checks = native_crc.read_crc32(file, pieces, offset)
    assert read == min(sum(lengths), MOST_BYTES - offset)
    if read == sum(lengths):
        assert checks == tuple(zlib.crc32(piece) for piece in pieces)
    assert b"".join(pieces)[:read] == noise[offset : offset + read]


@pytest.mark.skipif(not native_crc.available(), reason="there is no native library here, or it takes no checks")
def test_a_file_that_cannot_be_read_says_why() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        native_crc.read_crc32(-1, [memoryview(bytearray(8))], 0)


def test_without_a_library_it_is_zlib(noise: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_crc, "_library", lambda: None)
    assert not native_crc.available()
    assert native_crc.crc32(noise[1:99], 7) == zlib.crc32(noise[1:99], 7)


@pytest.mark.skipif(library() is None, reason="there is no native library here")
@pytest.mark.parametrize("level", ["portable"], indirect=True)
def test_a_processor_without_such_products_takes_zlib(level: str) -> None:
    assert not native_crc.available()
