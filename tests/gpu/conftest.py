"""Tests that need a CUDA device: skipped, with the reason said, where there is none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine: the GPU paths were not run")
