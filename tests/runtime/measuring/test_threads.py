"""What more threads give: which numbers are measured, the table, and what is refused."""

import sys

import msgspec
import pytest

from strata_planner.question.catalogue import catalogue
from strata_runtime.errors import RuntimeFaultError
from strata_runtime.measuring import threads


@pytest.mark.parametrize(
    ("processors", "counts"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_usual_numbers_double_up_to_all(processors: int, counts: list[int]) -> None:
    assert threads.usual_counts(processors) == counts


def test_the_table_tells_rates_and_how_many_times_those_of_the_fewest() -> None:
    one = msgspec.structs.replace(catalogue().profile("cpu"), bandwidth_bytes_per_second=20e9)
    two = msgspec.structs.replace(one, bandwidth_bytes_per_second=25e9)
    header, first, second = threads.table({2: two, 1: one}).splitlines()
    assert header.split()[:3] == ["threads", "reading,", "GB/s"]
    assert first.split()[:3] == ["1", "20.0", "(1.00)"]
    assert second.split()[:3] == ["2", "25.0", "(1.25)"]


def test_more_threads_than_processors_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)
    with pytest.raises(SystemExit):
        threads.main(["1", "3"])
    assert "threads 3: this process may use 2 processors; ask for at most so many" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["raise SystemExit(2)", "print('no profile')"])
def test_a_measurement_that_fails_says_so(program: str) -> None:
    with pytest.raises(RuntimeFaultError, match="measuring 2 threads failed"):
        threads.measured(2, command=(sys.executable, "-c", program))
