"""Progress that no terminal shows is lines in a log."""

import io
import re
import sys
import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata_runtime.progress import line, shown


class Log(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.lines = threading.Semaphore(0)

    def flush(self) -> None:
        super().flush()
        self.lines.release()


def test_a_line_comes_now_and_then_while_nothing_is_counted_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    with shown("quantizing", line_seconds=0.001) as update:
        update(1, 4)
        for _ in range(2):
            assert log.lines.acquire(timeout=30)
        while "25%" not in log.getvalue():  # lines may have come before anything was counted
            assert log.lines.acquire(timeout=30)
        update(4, 4)
    lines = log.getvalue().splitlines()
    assert len(lines) >= 3
    assert any(re.fullmatch(r"quantizing: 25% done in \d+ s, about \d+ s left", each) for each in lines)
    assert re.fullmatch(r"quantizing: 100% done in \d+ s", lines[-1])


def test_the_time_left_is_told_in_the_words_of_people() -> None:
    assert line("calibrating", 0, 0, 3) == "calibrating: begins, 3 s so far"
    assert line("calibrating", 1, 4, 60) == "calibrating: 25% done in 1 min 00 s, about 3 min 00 s left"
    assert line("calibrating", 1, 3, 3600) == "calibrating: 33% done in 1 h 00 min, about 2 h 00 min left"


@example(2.3e-308, 2.0, 2.0)  # a share so small that the time left is infinite
@given(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1e9))
def test_no_count_breaks_it(done: float, total: float, seconds: float) -> None:
    assert line("x", done, total, seconds).startswith("x: ")
