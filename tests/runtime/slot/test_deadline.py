"""When a step counts as hung: by a table and laws, then with real slots whose forward waits for ever."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.control import STEP_TIMEOUT_SECONDS, GetStatus, SlotStatus
from strata_planner.contract.formats import ComputeType
from strata_planner.contract.frames import StepFailure
from strata_runtime.loading.loader import Loader
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.slot import epoch
from strata_runtime.slot.__main__ import parse
from strata_runtime.slot.deadline import (
    FIRST_TIMES,
    MOST_COUNTED_SECONDS,
    TIMES,
    Deadline,
    Stillness,
    after_look,
    seconds_allowed,
)
from strata_runtime.wire.client import greedy
from tests.laws import swept
from tests.runtime.architectures import make_tiny_model
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

LOOK = 0.25
seconds = st.floats(0, 1e4)


@pytest.mark.parametrize(
    ("least", "planned", "longest", "first", "expected"),
    [
        pytest.param(30, 0, 0, False, 30, id="nothing is known of it"),
        pytest.param(30, 0.02, 0.4, False, 30, id="it is quick"),
        pytest.param(30, 8, 0.4, False, 8 * TIMES, id="a long prompt, by the plan"),
        pytest.param(30, 0.02, 20, False, 20 * TIMES, id="a swapped machine, by what was seen"),
        pytest.param(30, 0.02, 0, True, 30 * FIRST_TIMES, id="the first step after a load"),
        pytest.param(30, 8, 0, True, 8 * TIMES * FIRST_TIMES, id="the first step, which is long"),
        pytest.param(0, 8, 20, False, math.inf, id="it is turned off"),
    ],
)
def test_how_long_a_step_may_be_still(
    least: float,
    planned: float,
    longest: float,
    first: bool,  # noqa: FBT001
    expected: float,
) -> None:
    assert seconds_allowed(least, planned, longest, is_first=first) == expected


@given(st.lists(st.tuples(st.integers(0, 3), seconds), max_size=40))
def test_who_gets_on_from_look_to_look_never_hangs(looks: list[tuple[int, float]]) -> None:
    """However long lies between the looks, and whatever it is at."""
    deadline, now = Deadline(1.0, 0.0), 0.0
    for place, (waits, passed) in enumerate(looks):
        now += passed
        assert not deadline.look(None if waits == 0 else place, now, is_first=False)


@given(st.lists(seconds, min_size=1, max_size=40))
def test_what_nobody_looked_at_counts_little(passed: list[float]) -> None:
    """Who was stopped, with its clock going on, has seen nothing of the time."""
    still = Stillness(moved=1)
    for each in passed:
        still = after_look(still, 1, each)
    assert still.seconds <= min(sum(passed), len(passed) * MOST_COUNTED_SECONDS) + 1e-6


@given(least=st.floats(1, 100), pauses=st.lists(st.floats(0.25, 0.9), max_size=30))
def test_who_stays_where_it_is_hangs_and_who_goes_on_is_given_more_time(least: float, pauses: list[float]) -> None:
    deadline, now = Deadline(least, 0.0), 0.0
    deadline.look(0, now, is_first=False)
    while not (why := deadline.look(0, now, is_first=False)):
        now += LOOK
    assert least <= now <= least + LOOK
    assert "has not got on for" in why
    for pause in pauses:
        now += pause
        assert deadline.look(0, now, is_first=False) == why, "its status says the same at every look"
    assert not deadline.look(1, now, is_first=False)
    assert deadline.allowed(is_first=False) >= TIMES * least


CASES = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]  # stages, and which of them waits


class Forward:
    """Waits in the forward of the stage that begins with this layer, once told so, until `go`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.first_layer = -1
        self.came, self.go = threading.Event(), threading.Event()
        real: Callable[..., Any] = StageModel.forward

        def forward(model: StageModel, *given: Any, **named: Any) -> Any:
            if self.first_layer in model.held:
                self.came.set()
                self.go.wait(60)
            return real(model, *given, **named)

        patch.setattr(StageModel, "forward", forward)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forward]:
    made = Forward(monkeypatch)
    yield made
    made.go.set()


def hangs(status: SlotStatus) -> bool:
    return bool(status.hung)


@pytest.mark.parametrize("case", swept(CASES, [(1, 0), (3, 1)]))
def test_a_forward_that_waits_for_ever_is_told_by_its_own_stage_alone(
    shallow_llama: Path, forward: Forward, case: tuple[int, int]
) -> None:
    stages, stuck = case
    names = [f"s{number}" for number in range(stages)]
    plan = even_plan(shallow_llama, names)
    asked = [greedy("a", range(3, 12), 12)]
    with PipelineHarness(names, step_timeout=0.2) as pipeline:
        expected = pipeline.serve(plan).generate([greedy("a", range(3, 12), 12, salt="before")])
        leader = pipeline.serve(plan)
        forward.first_layer = plan.replicas[0].stages[stuck].layers[0]
        leader.send(asked[0])
        assert forward.came.wait(30)
        (hung,) = pipeline.slots[names[stuck]].until(hangs).hung
        assert (hung.replica, hung.stage) == (0, stuck)
        assert hung.reason.startswith("step 0 has not got on for")
        while leader.hello().lost != names[stuck]:
            pass
        assert not any(hangs(pipeline.slots[name].until(lambda _: True)) for name in names if name != names[stuck])
        forward.go.set()
        assert leader.collect(["a"]) == expected
        pipeline.slots[names[stuck]].until(lambda status: not status.hung)


def test_a_process_that_hangs_whole_and_can_tell_nobody_is_missed_by_its_leader(
    shallow_llama: Path, forward: Forward
) -> None:
    """Its libzmq goes on: no connection is lost."""
    names = ["s0", "s1", "s2"]
    plan = even_plan(shallow_llama, names)
    with PipelineHarness(names, step_timeout=0.2) as pipeline:
        leader = pipeline.serve(plan)
        deaf = pipeline.threads["s1"].slot
        deaf._watch_links = lambda: forward.came.wait(60) and forward.go.wait(60)  # type: ignore[method-assign]
        forward.first_layer = plan.replicas[0].stages[1].layers[0]
        leader.send(greedy("a", range(3, 12), 12))
        status = pipeline.slots["s0"].until(lambda status: bool(status.overdue))
        assert [(each.replica, each.stage) for each in status.overdue] == [(0, 0)]
        assert (status.hung, status.lost_peers) == ((), ())
        while not isinstance(said := leader.receive(), StepFailure):
            continue
        assert (said.requests, said.carried, said.reason) == (["a"], 1, "a step that does not end at a later stage")
        del deaf._watch_links
        forward.go.set()
        leader.collect(["a"])
        pipeline.slots["s0"].until(lambda status: not status.overdue)


@pytest.mark.parametrize("name", swept(["llama", "deepseek_v3", "lfm2", "qwen3_next", "llama4_text"], ["llama"]))
@pytest.mark.parametrize("compute_type", swept(["float32", "bfloat16"], ["bfloat16"]))
def test_a_step_gets_on_with_each_of_its_layers(tmp_path: Path, name: str, compute_type: ComputeType) -> None:
    """So that a stage of many slow ones is not accused."""
    model = make_tiny_model(tmp_path, name, vocab_size=128)
    with PipelineHarness(["s0"]) as pipeline:
        pipeline.serve(even_plan(model, ["s0"], compute_type=compute_type)).generate([greedy("a", range(3, 12), 4)])
        running = pipeline.threads["s0"].slot._running
        assert running is not None
        executor = running.roles[0].worker.executor
        first, last = executor.role.layers
        assert executor.model.layers_begun == executor.work.steps * (last + 1 - first)


def test_a_load_that_stands_still_is_told_and_one_beside_what_serves_is_not(
    shallow_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, go = threading.Event(), threading.Event()
    real: Callable[..., None] = Loader.store

    def store(*given: Any) -> None:
        came.set()
        go.wait(60)
        real(*given)

    with PipelineHarness(["s0", "s1"], step_timeout=0.05) as pipeline:
        pipeline.serve(even_plan(shallow_llama, ["s0"]))
        monkeypatch.setattr(Loader, "store", store)
        pipeline.prepare(even_plan(shallow_llama, ["s0", "s1"], bits=8))
        assert came.wait(30)
        (hung,) = pipeline.slots["s1"].until(hangs).hung
        assert (hung.replica, hung.stage) == (0, 1)
        assert hung.reason.startswith("loading it has not got on for")
        assert not hangs(pipeline.slots["s0"].ask(GetStatus()))
        go.set()
        pipeline.slots["s1"].until(lambda status: status.prepare.phase == "prepared")
        pipeline.slots["s1"].until(lambda status: not status.hung)


@pytest.mark.parametrize("value", ["-1", "inf", "nan", "soon"])
def test_what_is_no_time_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CONTROL_KEY", "key")
    given = ["--name", "a", "--control-port", "1"]
    with pytest.raises(SystemExit):
        parse([*given, "--step-timeout", value])
    monkeypatch.setenv("STRATA_STEP_TIMEOUT_SECONDS", value)
    with pytest.raises(SystemExit):
        parse(given)


def test_how_long_a_step_may_be_still_comes_from_the_command_line_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STRATA_CONTROL_KEY", "key")
    given = ["--name", "a", "--control-port", "1"]
    assert parse(given).step_timeout == STEP_TIMEOUT_SECONDS
    monkeypatch.setenv("STRATA_STEP_TIMEOUT_SECONDS", "12")
    assert parse(given).step_timeout == 12
    assert parse([*given, "--step-timeout", "0"]).step_timeout == 0


def test_a_process_that_is_to_leave_an_epoch_with_such_a_step_ends(
    shallow_llama: Path, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever told it to switch would wait for ever; here the step goes on in place of an end."""
    plan = even_plan(shallow_llama, ["s0", "s1"])
    ended: list[str] = []

    def gives_up(worker: str) -> None:
        ended.append(worker)
        forward.go.set()

    monkeypatch.setattr(epoch, "_give_up", gives_up)
    with PipelineHarness(["s0", "s1"], step_timeout=1.0) as pipeline:  # time for healthy ones to leave
        expected = pipeline.serve(plan).generate([greedy("a", range(3, 12), 12, salt="before")])
        leader = pipeline.serve(plan)
        forward.first_layer = plan.replicas[0].stages[1].layers[0]
        leader.send(greedy("a", range(3, 12), 12))
        assert forward.came.wait(30)
        leader = pipeline.serve(plan)
        assert ended == ["s1 replica 0 stage 1"]
        assert leader.generate([greedy("a", range(3, 12), 12)]) == expected
