"""Tests that need a CUDA device: skipped, with the reason said, where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strata_runtime.formats import measured
from strata_runtime.formats.vendor_sums import add_in_float32


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine: the GPU paths were not run")
    add_in_float32(torch.device("cuda"))


@pytest.fixture(autouse=True)
def _without_the_machines_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was measured on this machine chooses no kernel of a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured._kept.cache_clear()
    yield
    measured._kept.cache_clear()
