"""One thread, whose own time is taken, and a survey of few works."""

import pytest
import torch

from strata_runtime.measuring.profiling import handling
from strata_runtime.measuring.profiling import survey as surveys
from strata_runtime.measuring.profiling.handling import Load
from tests.runtime.measuring.profiling.shapes import WORKS


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "grid", lambda _: list(WORKS[1:]))
    monkeypatch.setattr(surveys, "DECODE_SEQUENCES", (1, 4))
    monkeypatch.setattr(surveys, "PASS_SECONDS", 0.0)
    monkeypatch.setattr(surveys, "PASSES", 1)
    monkeypatch.setattr(surveys, "LOADS", (Load(2, 3, 4),))
    monkeypatch.setattr(handling, "_READ_BYTES", 1 << 12)
