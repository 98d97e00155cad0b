"""Tokens drafted by a small model beside the leader: what it computes, and what that saves. That no text changes is a law of `test_engine`."""

import pytest

from strata_planner.contract.frames import Submit, TokenEvent
from strata_planner.contract.plan import Speculation
from tests.runtime.scheduler.pipeline import Pipeline, SmallModel, sampled, submit, text_of, wrong
from tests.runtime.scheduler.test_engine import limits, prompt

DRAFT = Speculation("draft", 4)
EVER = 10_000  # positions


def beside(small: SmallModel, speculation: Speculation = DRAFT, **changes: int) -> Pipeline:
    asked = {"stages": 1, "page_budget": 400, "max_model_len": 800, "draft_positions": EVER} | changes
    return Pipeline.beside(limits(speculation, keeps_drafts=small.keeps_drafts, **asked), small)


def run(pipeline: Pipeline, *asked: Submit) -> list[TokenEvent]:
    """The answers are those of each request alone."""
    for each in asked:
        pipeline.engine.submit(each)
    events = pipeline.drain()
    for each in asked:
        assert [event.token for event in events if event.request == each.request] == text_of(each)
    return events


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_model_that_is_always_right_saves_all_but_one_step_a_round(tokens: int) -> None:
    """And computes each position once: nothing of it is out of place, or computed again."""
    small = SmallModel(sampled)
    pipeline = beside(small, Speculation("draft", tokens))
    run(pipeline, submit("r0", prompt(0, 6), 1 + 6 * (tokens + 1), stop_tokens=[]))
    counts = pipeline.engine.scheduler.speculation.counts
    assert pipeline.steps == 1 + 6 + 1, "the prompt, the rounds, the end"
    assert small.rounds == 6
    assert counts.accepted_tokens == counts.draft_tokens == 6 * tokens
    assert small.computed == 6 + 6 * (tokens + 1) - 1, "prompt and answer but its last round's last draft"


def test_what_follows_from_its_own_states_is_computed_again() -> None:
    """Of a head: each round begins with all that was accepted since, never with what it left of its drafts."""
    small = SmallModel(sampled, keeps_drafts=False)
    pipeline = beside(small, Speculation("eagle", 4))
    run(pipeline, submit("r0", prompt(0, 6), 1 + 6 * 5, stop_tokens=[]))
    counts = pipeline.engine.scheduler.speculation.counts
    assert counts.accepted_tokens == counts.draft_tokens == 6 * 4
    assert [len(tasks[0].tokens) for tasks in small.tasks] == [7, 5, 5, 5, 5, 5]
    assert pipeline.engine.scheduler.speculation.draft_pace.knows(1)


def test_a_model_that_is_never_right_costs_no_step() -> None:
    """And goes on from the text, never from what was refused: the small model itself asserts it."""
    small = SmallModel(wrong)
    pipeline = beside(small)
    run(pipeline, submit("r0", prompt(0, 6), 20, stop_tokens=[]))
    assert pipeline.steps == 20 + 1
    assert pipeline.engine.scheduler.speculation.counts.accepted_tokens == 0
    assert small.rounds == 18, "the last token is not drafted for"


def test_sequences_are_drafted_together() -> None:
    small = SmallModel()
    pipeline = beside(small, step=32)
    run(pipeline, *(submit(f"r{number}", [*prompt(0, 6), 200 + number], 24, stop_tokens=[]) for number in range(3)))
    assert small.rounds <= pipeline.steps <= 20
    assert pipeline.engine.kv_usage == 0


def test_what_others_have_in_common_is_computed_once() -> None:
    """A prompt whose blocks the small model has filled for another request."""
    small = SmallModel()
    pipeline = beside(small)
    run(pipeline, submit("r0", prompt(0, 41), 9, stop_tokens=[]))
    before = small.computed
    run(pipeline, submit("r1", prompt(0, 41), 3, stop_tokens=[]))
    assert small.computed - before == 2, "the prompt's last token and the first of the answer"


def test_a_block_that_was_taken_for_something_else_is_computed_again() -> None:
    """The small model asserts that it goes on from the same text."""
    small = SmallModel()
    pipeline = beside(small, page_budget=12)
    for number in range(4):
        run(pipeline, submit(f"r{number}", prompt(number % 2, 30), 6, stop_tokens=[]))
    assert small.computed > 2 * 36, "more than two texts, each once"


def test_a_long_prompt_is_taken_up_in_parts_while_others_are_drafted() -> None:
    """At most a step's tokens at a time, those that lack least first."""
    small = SmallModel(sampled)
    pipeline = beside(small, step=16)
    pipeline.engine.submit(submit("r0", prompt(0, 100), 60, stop_tokens=[]))
    while not (pipeline.step() and pipeline.result()):
        pass
    run(pipeline, submit("r1", prompt(1, 4), 60, stop_tokens=[]))
    taking_up = [tasks for tasks in small.tasks if any(task.sequence == 0 and not task.count for task in tasks)]
    assert len(taking_up) >= 100 // 16
    assert all(any(task.sequence == 1 and task.count for task in tasks) for tasks in taking_up)
    counts = pipeline.engine.scheduler.speculation.counts
    assert counts.accepted_tokens == counts.draft_tokens > 60


def test_while_prompts_are_computed_nothing_is_drafted() -> None:
    small = SmallModel()
    pipeline = beside(small, step=16)
    pipeline.engine.submit(submit("r0", prompt(0, 6), 60, stop_tokens=[]))
    for _ in range(5):
        pipeline.step()
        pipeline.result()
    rounds, later = small.rounds, submit("r1", prompt(1, 100), 1)
    assert rounds
    pipeline.engine.submit(later)
    while not any(event.request == "r1" for event in (pipeline.step(), *pipeline.result())[1:]):
        pass
    assert small.rounds == rounds
    pipeline.drain()
    assert small.rounds > rounds


def test_nothing_is_drafted_beyond_its_positions() -> None:
    """It has 20 of them; the small model asserts it."""
    small = SmallModel(sampled)
    pipeline = beside(small, draft_positions=20)
    run(pipeline, submit("r0", prompt(0, 6), 40, stop_tokens=[]))
    assert small.rounds
    assert pipeline.steps > 20


def test_drafts_take_only_blocks_that_are_free() -> None:
    pipeline = beside(SmallModel(), page_budget=8, sharing=0, max_model_len=48)
    run(pipeline, *(submit(f"r{number}", [*prompt(0, 6), 200 + number], 9, stop_tokens=[]) for number in range(2)))
    assert pipeline.engine.scheduler.preemptions == 0
    assert pipeline.engine.scheduler.speculation.counts.draft_tokens > 0


@pytest.mark.parametrize(("seconds", "pays"), [(0.001, True), (0.02, False)])
def test_auto_drafts_where_it_pays(seconds: float, *, pays: bool) -> None:
    """A small model at a tenth of a step's time, and at twice: most rounds are drafted, or next to none."""
    small = SmallModel(seconds=seconds)
    pipeline = beside(small, Speculation("auto", 4))
    run(pipeline, submit("r0", prompt(0, 6), 600, stop_tokens=[]))
    assert (small.rounds > pipeline.steps / 2) == pays
    assert pays or small.rounds <= 3 + pipeline.steps // 60
