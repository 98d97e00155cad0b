"""Working ahead: results in order, never more than promised, errors in their turn, nothing left running."""

import threading
from collections.abc import Callable, Iterator

import pytest

from strata_runtime.loading.stream import ahead


class Ledger:
    """Tasks that count how many results exist: made, and not yet let go by the consumer."""

    def __init__(self, count: int) -> None:
        self.begun: list[int] = []
        self.held = 0
        self.most = 0
        self.count = count

    def tasks(self) -> Iterator[Callable[[], int]]:
        return (self._task(number) for number in range(self.count))

    def _task(self, number: int) -> Callable[[], int]:
        def run() -> int:
            self.begun.append(number)
            self.held += 1
            self.most = max(self.most, self.held)
            return number

        return run


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_come_in_order_and_only_so_many_exist(depth: int) -> None:
    ledger = Ledger(20)
    seen = []
    for number in ahead(ledger.tasks(), depth):
        seen.append(number)
        ledger.held -= 1
    assert seen == list(range(20))
    assert ledger.most <= depth + 1


def test_the_next_task_runs_while_the_caller_works() -> None:
    second = threading.Event()
    tasks: list[Callable[[], object]] = [lambda: None, second.set]
    results = ahead(tasks)
    next(results)
    assert second.wait(30)
    assert list(results) == [None]


def test_an_error_is_raised_in_its_turn_and_ends_the_work() -> None:
    ledger = Ledger(9)

    def broken() -> int:
        raise ValueError("here")

    tasks = list(ledger.tasks())
    tasks[2] = broken
    seen = []
    with pytest.raises(ValueError, match="here"):
        seen.extend(ahead(tasks))
    assert ledger.begun in ([0, 1], [0, 1, 3])
    assert not _readers()


def test_a_caller_that_stops_leaves_no_thread() -> None:
    ledger = Ledger(9)
    results = ahead(ledger.tasks())
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(ledger.begun) <= 2
    assert not _readers()


def test_no_tasks_no_results() -> None:
    assert list(ahead([])) == []


def _readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]
