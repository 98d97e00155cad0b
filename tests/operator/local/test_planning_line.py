"""What a terminal shows while a plan is searched for, and that nothing else hears of it."""

import io
from dataclasses import replace

from rich.console import Console

from strata_operator.local.planning_line import PlanningLine, line_of, planning_line
from strata_planner.question.request import Objective
from strata_planner.search.watch import Progress
from tests.planner.builders import a_request

REQUEST = replace(a_request(), solver="auto", theta=0.0)


def test_the_best_so_far_stands_in_the_goals_unit_beside_the_work_that_is_done() -> None:
    assert line_of(REQUEST, Progress(None, 0.0)) == "planning: no plan yet; 0% of the limit of work"
    assert line_of(REQUEST, Progress(123.44, 0.41)) == "planning: best so far 123.4 tokens/s; 41% of the limit of work"
    slow = replace(REQUEST, objective=Objective("latency"))
    assert "best so far 2.5 s a request;" in line_of(slow, Progress(-2.5, 0.5))
    assert line_of(replace(REQUEST, solver="pipeline"), Progress(None, 0.5)).endswith("50% of the limit of time")


def test_a_terminal_shows_it_a_file_does_not() -> None:
    for is_terminal, quiet, shown in ((True, False, True), (False, False, False), (True, True, False)):
        written = io.StringIO()
        console = Console(file=written, force_terminal=is_terminal, width=100)
        with planning_line(REQUEST, console, quiet=quiet) as line:
            line.watch(Progress(123.44, 0.41))
            line.say("looking at alternatives")
        assert bool(written.getvalue()) == shown


def test_it_is_written_no_more_often_than_people_read() -> None:
    class Line:
        def __init__(self) -> None:
            self.written: list[str] = []

        def update(self, line: str) -> None:
            self.written.append(line)

    line, now = Line(), [0.0]
    shown = PlanningLine(REQUEST, line, lambda: now[0])  # type: ignore[arg-type]
    for step in range(1000):
        now[0] = step / 1000
        shown.watch(Progress(float(step), step / 1000))
    assert len(line.written) == 5
