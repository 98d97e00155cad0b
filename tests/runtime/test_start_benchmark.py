"""`benchmarks.start`: the rows of a run, and when their goals are met."""

import os
from pathlib import Path

import pytest

from benchmarks.rows import LISTED, Row
from benchmarks.start import Memory, memory_of, rows_of

MB = 1_000_000
NOTHING = Memory(0, 0, 0, 0)


def test_a_whole_run_has_every_listed_row_once() -> None:
    assert [row.name for row in rows_of([1.0], NOTHING, 0, 0)] == [*LISTED["start"]]


def test_the_peak_counts_shared_pages_as_they_are_shared_now() -> None:
    assert Memory(rss=900, pss=700, own=600, peak=950).peak_pss == 750


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (rows_of([1.0], Memory(0, 0, 0, 800 * MB), 500 * MB, 0)[0], True),
        (rows_of([1.0], Memory(0, 0, 0, 800 * MB + 1), 500 * MB, 0)[0], False),
        (rows_of([1.0], Memory(900 * MB, 700 * MB, 0, 1000 * MB), 500 * MB, 0)[0], True),
        (rows_of([1.0], NOTHING, 0, 1200 * MB)[2], True),
        (rows_of([1.0], NOTHING, 0, 1200 * MB + 1)[2], False),
        (rows_of([9.0, 3.0, 1.0], NOTHING, 0, 0)[3], True),
        (rows_of([1.0, 3.1, 4.0], NOTHING, 0, 0)[3], False),
    ],
)
def test_goals(row: Row, met: bool) -> None:  # noqa: FBT001 -- a case
    assert row.met == met


def test_memory_of_a_process() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("the kernel tells no shares")
    memory = memory_of(os.getpid())
    assert 0 < memory.own <= memory.pss <= memory.rss
    assert memory.peak > 0
