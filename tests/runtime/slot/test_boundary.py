"""The law of the boundary: a change never runs within a step, no step begins within a change, and a closed boundary changes nothing."""

import threading
from collections.abc import Callable

import pytest

from strata_runtime.stage.boundary import BoundaryClosedError, StepBoundary

PATIENCE_SECONDS = 10.0


class Asked(threading.Thread):
    """A change that another thread asks for."""

    def __init__(self, boundary: StepBoundary, change: Callable[[], object]) -> None:
        super().__init__()
        self._boundary, self._change = boundary, change
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._boundary.between_steps(self._change)
        except Exception as error:  # noqa: BLE001  what it is, is what is tested
            self.error = error

    def ended(self) -> bool:
        self.join(PATIENCE_SECONDS)
        return not self.is_alive()


def waits(boundary: StepBoundary, count: int) -> None:
    """Until so many changes wait for the end of the step."""
    gate = threading.Event()
    while len(boundary._waiting) < count:
        gate.wait(0.001)


def test_an_idle_stage_is_changed_at_once_in_the_askers_thread() -> None:
    assert StepBoundary().between_steps(threading.get_ident) == threading.get_ident()


def test_changes_wait_for_the_end_of_the_step_and_keep_their_order() -> None:
    boundary, seen = StepBoundary(), list[str]()
    with boundary.step():
        first = Asked(boundary, lambda: seen.append("first"))
        waits(boundary, 1)
        second = Asked(boundary, lambda: seen.append("second"))
        waits(boundary, 2)
        seen.append("step")
    assert seen == ["step", "first", "second"]
    assert first.ended()
    assert second.ended()


def test_a_step_that_fails_lets_waiting_changes_through() -> None:
    boundary, seen = StepBoundary(), list[str]()

    def fails() -> Asked:
        with boundary.step():
            asked = Asked(boundary, lambda: seen.append("changed"))
            waits(boundary, 1)
            raise RuntimeError("step")
        return asked

    with pytest.raises(RuntimeError, match="step"):
        fails()
    assert seen == ["changed"]


def test_what_a_change_raises_is_raised_where_it_was_asked_for() -> None:
    boundary = StepBoundary()
    with boundary.step():
        asked = Asked(boundary, lambda: 1 // 0)
        waits(boundary, 1)
    assert asked.ended()
    assert isinstance(asked.error, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        boundary.between_steps(lambda: 1 // 0)
    assert boundary.between_steps(lambda: 7) == 7


def test_closing_refuses_what_waits_and_what_comes_until_it_is_opened() -> None:
    boundary, seen = StepBoundary(), list[str]()
    with boundary.step():
        asked = Asked(boundary, lambda: seen.append("late"))
        waits(boundary, 1)
        boundary.close("an epoch is being prepared")
        assert asked.ended()
    assert isinstance(asked.error, BoundaryClosedError)
    with pytest.raises(BoundaryClosedError, match="an epoch is being prepared"):
        boundary.between_steps(lambda: seen.append("late"))
    assert not seen
    boundary.open()
    assert boundary.between_steps(lambda: "now") == "now"


def test_steps_and_changes_never_overlap() -> None:
    boundary, inside = StepBoundary(), list[str]()
    overlaps: list[str] = []

    def alone(name: str) -> None:
        if inside:
            overlaps.append(name)
        inside.append(name)
        inside.pop()

    def change_often() -> None:
        for _ in range(300):
            boundary.between_steps(lambda: alone("change"))

    thread = threading.Thread(target=change_often)
    thread.start()
    while thread.is_alive():
        with boundary.step():
            alone("step")
    thread.join()
    assert not overlaps
