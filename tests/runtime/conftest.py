"""What tests of the native library share: each path of the processor that this machine has."""

import ctypes
from collections.abc import Iterator

import pytest

import strata_runtime.model  # noqa: F401  before any test imports transformers: they run with what slots run with
from strata_runtime.kernels.native import library

LEVELS = ("portable", "avx2", "avx512")  # `Level` of kernels/native/cpu.h


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The library takes this path while the test runs."""
    found = library()
    if found is None:
        pytest.skip("no native library is here")
    found.strata_limit_cpu_level.argtypes = [ctypes.c_int]
    wanted = LEVELS.index(request.param)
    try:
        if found.strata_limit_cpu_level(wanted) != wanted:
            pytest.skip(f"this processor has no {request.param}")
        yield request.param
    finally:
        found.strata_limit_cpu_level(len(LEVELS) - 1)
