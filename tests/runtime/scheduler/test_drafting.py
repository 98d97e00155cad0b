"""Tokens drafted by coarser weights: how many steps they take and save, and who waits for them. That no text changes is a law of `test_engine`."""

from dataclasses import replace

import pytest
from msgspec import structs

from strata_planner.contract.frames import Sampling, Submit, TokenEvent
from strata_planner.contract.plan import Speculation, SpeculationMode
from strata_runtime.scheduler.engine import Engine
from tests.runtime.scheduler.pipeline import Pipeline, grammar, submit, text_of
from tests.runtime.scheduler.test_engine import limits, prompt

SELF = Speculation("selfPrecision", 4)


def check(events: list[TokenEvent], *asked: Submit) -> None:
    """Each has its own text."""
    for each in asked:
        assert [event.token for event in events if event.request == each.request] == text_of(each)


def run(engine: Engine, pipeline: Pipeline, *names: str, kind: int = 0, answer: int = 24, **fields: Sampling) -> int:
    """Target steps that it took until the answers were there."""
    asked = [
        submit(name, [*prompt(kind, 6), 200 + place], answer, stop_tokens=[], **fields)
        for place, name in enumerate(names)
    ]
    for each in asked:
        engine.submit(each)
    before = pipeline.steps - pipeline.draft_steps
    check(pipeline.drain(), *asked)
    return pipeline.steps - pipeline.draft_steps - before


def test_drafts_are_verified_together() -> None:
    """Four drafts a round for each of three sequences, which stay in step: as many steps as one of them takes alone, about."""
    engine = Engine(limits(SELF, stages=1, page_budget=64, step=32))
    pipeline = Pipeline(engine)
    assert run(engine, pipeline, "r0", "r1", "r2") <= 18
    counts = engine.scheduler.speculation.counts
    assert counts.draft_tokens > 0
    assert counts.accepted_tokens > counts.draft_tokens / 3
    assert pipeline.draft_steps <= 4 * 18
    assert engine.kv_usage == 0


def test_without_coarser_weights_nothing_is_drafted() -> None:
    engine = Engine(limits(Speculation("ngram", 4), stages=1))
    pipeline = Pipeline(engine)
    run(engine, pipeline, "r0")
    assert pipeline.draft_steps == 0


def test_while_prompts_are_computed_nothing_is_drafted() -> None:
    """A prompt that comes in the midst of a round takes no step more than it needs."""
    engine = Engine(limits(SELF, stages=1, page_budget=64, max_model_len=200, step=16))
    pipeline = Pipeline(engine)
    engine.submit(submit("r0", prompt(0, 6), 60, stop_tokens=[]))
    while pipeline.draft_steps % 4 != 2:
        pipeline.step()
        pipeline.result()
    engine.submit(submit("r1", prompt(1, 100), 1))
    before, drafts = pipeline.steps, pipeline.draft_steps
    while not any(event.request == "r1" for event in (pipeline.step(), *pipeline.result())[1:]):
        pass
    assert pipeline.draft_steps == drafts
    assert pipeline.steps - before <= 100 // 8
    pipeline.drain()
    assert pipeline.draft_steps > drafts


def test_steps_that_verify_drafts_take_more_of_a_prompt() -> None:
    """What is answered sooner brings prompts sooner."""
    planned = limits(Speculation("ngram", 4), stages=1, page_budget=400, max_model_len=1000, step=64)
    planned = replace(planned, micro_batch=structs.replace(planned.micro_batch, prompts_per_token=2.0))
    pipeline = Pipeline(Engine(planned), row_seconds=0.1)  # the pace allows next to nothing
    pipeline.engine.submit(submit("r0", [100, 101, 102, 101] * 4, 400, stop_tokens=[]))
    for _ in range(40):
        pipeline.step()
        pipeline.result()
    pipeline.engine.submit(submit("r1", prompt(1, 900), 1))
    taken: dict[int, set[int]] = {}
    for _ in range(40):
        step = pipeline.engine.next_step()
        assert step is not None
        stream, *chunks = step.segments
        taken.setdefault(stream.length - 1, set()).add(sum(each.length for each in chunks))
        pipeline.accept(step)
        pipeline.result()
    assert len(taken) > 1
    least = [min(taken[drafts]) for drafts in sorted(taken)]
    assert least == sorted(set(least))


def test_drafts_take_only_blocks_that_are_free() -> None:
    """Two sequences that fill the pool: neither is driven out for a draft of the other."""
    engine = Engine(limits(SELF, stages=1, page_budget=8, sharing=0))
    pipeline = Pipeline(engine)
    run(engine, pipeline, "r0", "r1", answer=9)
    assert engine.scheduler.preemptions == 0
    assert pipeline.draft_steps > 0


def test_a_block_that_others_may_hold_is_not_drafted_in() -> None:
    """The prompt fills its blocks, its last position is computed once more since the grammar is not there yet, and another request shares them."""
    engine = Engine(limits(SELF, stages=2, page_budget=32))
    pipeline = Pipeline(engine)
    slow = submit("r0", prompt(0, 8), 8, stop_tokens=[], sampling=grammar(6, 20))
    engine.submit(slow)
    pipeline.step()
    events = pipeline.result()
    pipeline.step()
    later = submit("r1", prompt(0, 13), 8, stop_tokens=[])
    engine.submit(later)
    check(events + pipeline.drain(), slow, later)


def test_what_was_drafted_has_no_name() -> None:
    """A request that ends in the midst of its drafts: who asks for its text and what was drafted finds what was computed for good."""
    engine = Engine(limits(SELF, stages=1, page_budget=32))
    pipeline = Pipeline(engine)
    engine.submit(submit("r0", prompt(0, 6), 24, stop_tokens=[]))
    for _ in range(4):
        pipeline.step()
        pipeline.result()
    (sequence,) = engine.scheduler.running.values()
    assert sequence.guesses is not None
    assert len(sequence.guesses.next) == 3, "four drafts and no more: the block is full but for the last"
    guessed = [*sequence.tokens, *sequence.guesses.next]
    engine.abort("r0")
    later = submit("r1", [*guessed, 200], 8, stop_tokens=[])
    engine.submit(later)
    events = pipeline.drain()
    check(events, later)
    assert events[0].found == 4


def test_who_gave_its_blocks_back_waits_for_its_draft() -> None:
    """Computed again before, it would be ready twice."""
    engine = Engine(limits(SELF, stages=2, page_budget=9, sharing=0, decode=1))
    pipeline = Pipeline(engine)
    asked = [submit(f"r{number}", prompt(number, 6), 12, stop_tokens=[]) for number in range(3)]
    for each in asked:
        engine.submit(each)
    events, waited = pipeline.drain_watching(
        lambda: any(
            each.awaited and each.guesses is not None and each.guesses.is_drafting for each in engine.scheduler.waiting
        )
    )
    assert waited, "one was driven out while a draft of it was on the way"
    check(events, *asked)


@pytest.mark.parametrize("mode", ["ngram", "selfPrecision"])
def test_a_prompt_with_scores_whose_grammar_is_late_verifies_nothing(mode: SpeculationMode) -> None:
    """All its rows are its prompt's until its first token is there."""
    engine = Engine(limits(Speculation(mode, 4), stages=1))
    asked = submit(
        "r0", [100, 101] * 4 + [100], 8, stop_tokens=[], sampling=structs.replace(grammar(3, 9), prompt_logprobs=0)
    )
    engine.submit(asked)
    check(Pipeline(engine).drain(), asked)


@pytest.mark.parametrize(("draft_seconds", "drafts"), [(0.001, True), (0.02, False)])
def test_auto_drafts_where_it_pays(draft_seconds: float, *, drafts: bool) -> None:
    """Steps that draft at a tenth of the others' time, and at twice: most rounds draft, or next to none."""
    engine = Engine(limits(Speculation("auto", 4), stages=1, page_budget=400, max_model_len=800))
    pipeline = Pipeline(engine, draft_seconds=draft_seconds)
    steps = run(engine, pipeline, "r0", answer=600)
    assert (pipeline.draft_steps > steps) == drafts
    assert drafts or pipeline.draft_steps <= 2 + steps // 60
