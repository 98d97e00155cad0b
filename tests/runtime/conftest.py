"""What tests of the native library share: each path of the processor that this machine has."""

import ctypes
import importlib
from collections.abc import Iterator

import pytest

from tests.laws import Lazy

native = Lazy("strata_runtime.kernels.native")
LEVELS = ("portable", "avx2", "avx512")  # `Level` of kernels/native/cpu.h


def pytest_collectstart() -> None:
    """Before any test imports transformers: they run with what slots run with. Who only deals tests out to workers collects none."""
    importlib.import_module("strata_runtime.model")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The library takes this path while the test runs."""
    found = native.library()
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
