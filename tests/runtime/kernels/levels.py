"""What tests of kernels share that the native library has in AVX2 and in AVX-512: each of the two that this processor has."""

import pytest
from hypothesis import HealthCheck, settings

from strata_runtime.kernels import native_dense
from tests.laws import share

EACH_LEVEL = [
    pytest.mark.skipif(not native_dense.runs(), reason="this processor has no such kernels"),
    pytest.mark.parametrize("level", ["avx2", "avx512"], indirect=True),
    pytest.mark.usefixtures("level"),
]


def laws(examples: int) -> settings:
    """So many of them in `make test-all`."""
    return settings(
        max_examples=share(examples), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
