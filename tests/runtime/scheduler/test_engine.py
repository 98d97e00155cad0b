"""The engine's laws, over an in-memory pipeline that computes what is in its blocks: every request gets its own text, once."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from strata_planner.contract.frames import (
    Free,
    Grammar,
    LogitRules,
    SampledToken,
    Sampling,
    StepResult,
    Submit,
    TokenEvent,
)
from strata_planner.contract.plan import NO_SPECULATION, MicroBatch, Speculation
from strata_planner.contract.steps import FEWEST_TOKENS
from strata_runtime.errors import RequestRefusedError, StepError
from strata_runtime.scheduler.engine import Engine
from strata_runtime.scheduler.scheduler import Limits
from tests.laws import share
from tests.runtime.scheduler.pipeline import STOP, Pipeline, SmallModel, allowed, grammar, scores_of, submit, text_of

GREEDY = Sampling(temperature=0)
SCORED = Sampling(temperature=0, prompt_logprobs=0)


def limits(speculation: Speculation = NO_SPECULATION, **changes: int) -> Limits:
    values = {
        "stages": 2,
        "prefill": 2,
        "decode": 4,
        "step": 16,
        "page_tokens": 4,
        "page_budget": 16,
        "max_model_len": 48,
        "draft_positions": 0,
    }
    values |= changes
    return Limits(
        under_way=values["stages"],
        micro_batch=MicroBatch(prefill=values["prefill"], decode=values["decode"], max_step_tokens=values["step"]),
        page_tokens=values["page_tokens"],
        page_budget=values["page_budget"],
        max_model_len=values["max_model_len"],
        sharing=bool(values.get("sharing", 1)),
        speculation=speculation,
        drafts=speculation.mode in {"auto", "selfPrecision"},
        state_slots=values.get("state_slots", 0),
        draft_positions=values["draft_positions"],
        keeps_drafts=bool(values.get("keeps_drafts", 1)),
    )


def prompt(kind: int, length: int) -> list[int]:
    """Prompts of one kind begin alike; those of two kinds differ from the first token on."""
    return [100 + (kind + place * (place + kind)) % (3 if place else 50) for place in range(length)]


class EngineMachine(RuleBasedStateMachine):
    """Any interleaving of what gateways ask, steps, results and changes of weights."""

    @initialize(
        stages=st.integers(1, 4),
        step=st.integers(5, 24),
        decode=st.integers(1, 4),
        prefill=st.integers(1, 3),
        pages=st.integers(8, 20),
        sharing=st.booleans(),
        speculation=st.builds(
            Speculation,
            st.sampled_from(
                ["none", "auto", "ngram", "suffix", *["selfPrecision"] * 3, *["draft"] * 3, *["eagle"] * 2]
            ),
            st.integers(1, 5),
        ),
        state_slots=st.sampled_from([0, 0, 1, 2, 4]),
        small=st.sampled_from([0, 14, 1000]),
    )
    def start(
        self,
        stages: int,
        step: int,
        decode: int,
        prefill: int,
        pages: int,
        sharing: bool,  # noqa: FBT001
        speculation: Speculation,
        state_slots: int,
        small: int,
    ) -> None:
        """`small`: positions of a small model, where one drafts."""
        changes = {"stages": stages, "step": step, "decode": decode, "prefill": prefill, "page_budget": pages}
        if state_slots:  # as a plan has it for models whose sequences keep state
            changes, sharing, speculation = changes | {"state_slots": state_slots}, False, NO_SPECULATION
        if speculation.mode in {"auto", "draft", "eagle"}:
            changes["draft_positions"] = small or 1000 * (speculation.mode != "auto")
        if is_head := speculation.mode == "eagle":
            changes |= {"stages": 1, "keeps_drafts": 0}
        asked = limits(speculation, **changes, sharing=sharing, max_model_len=32)
        self.pipeline = Pipeline.beside(asked, SmallModel(keeps_drafts=not is_head))
        self.engine = self.pipeline.engine
        self.submitted: list[Submit] = []
        self.aborted: set[str] = set()
        self.events: list[TokenEvent] = []

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, 20),
        answer=st.integers(1, 12),
        delivered=st.integers(0, 4),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        deadline=st.sampled_from([math.inf, math.inf, 5.0, 1.0]),
        sampling=st.just(GREEDY) | st.just(SCORED) | st.builds(grammar, st.integers(0, 4), st.integers(1, 20)),
    )
    def ask(self, kind: int, length: int, answer: int, **fields: Any) -> None:
        asked = submit(f"r{len(self.submitted)}", prompt(kind, length), answer, **fields)
        self.submitted.append(asked)
        self.engine.submit(asked)

    @rule(number=st.integers(0, 5), answer=st.integers(1, 8))
    def ask_further(self, number: int, answer: int) -> None:
        """As who goes on with a text that is being written: what is guessed of it may be right."""
        running = list(self.engine.scheduler.running.values())
        if number < len(running):
            known = [*running[number].tokens, *(running[number].guesses.next if running[number].guesses else ())]
            asked = submit(f"r{len(self.submitted)}", [*known[: 31 - answer], 200], answer)
            self.submitted.append(asked)
            self.engine.submit(asked)

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        if number < len(self.submitted):
            self.aborted.add(f"r{number}")
            self.engine.abort(f"r{number}")

    @rule(count=st.integers(1, 5))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.pipeline.step()
            if len(self.pipeline.in_flight) == self.engine.scheduler.limits.under_way:
                self.events.extend(self.pipeline.result())

    @rule()
    def step(self) -> None:
        self.pipeline.step()

    @rule()
    def result(self) -> None:
        if self.pipeline.in_flight:
            self.events.extend(self.pipeline.result())

    @rule()
    def other_weights(self) -> None:
        self.pipeline.weights += 1

    @rule(loses=st.booleans(), pages=st.integers(8, 20))
    def take_over(self, *, loses: bool, pages: int) -> None:
        """The next epoch, whose stages have kept the blocks, but for a layer or none. Gateways replay what is running; what is under way is lost."""
        asked = dataclasses.replace(self.engine.scheduler.limits, page_budget=pages)
        self.pipeline = Pipeline.after(
            self.pipeline, asked, refill=(1, 2) if loses else (0, 0), small=SmallModel(keeps_drafts=asked.keeps_drafts)
        )
        self.engine = self.pipeline.engine
        for each in self.submitted:
            got = [event for event in self.events if event.request == each.request]
            if each.request not in self.aborted and not (got and got[-1].finish):
                delivered = [*each.delivered, *(event.token for event in got)]
                self.engine.submit(structs.replace(each, delivered=delivered))

    @invariant()
    def every_block_is_held_as_often_as_it_says(self) -> None:
        self.pipeline.integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.events.extend(self.pipeline.drain())
        for asked in self.submitted:
            got = [event for event in self.events if event.request == asked.request]
            text = text_of(asked)
            known = len(asked.delivered)
            told = [list(event.prompt) for event in got]
            scores = scores_of(asked) if asked.sampling == SCORED and not asked.delivered else []
            assert told == [scores, *([] for _ in told[1:])][: len(told)], (
                "a prompt's scores come once, with the first token"
            )
            ends_in_the_midst = len(text) == allowed(asked.sampling) < asked.max_tokens and text[-1] != STOP
            if ends_in_the_midst and (asked.request not in self.aborted or (got and got[-1].finish == "never")):
                assert got.pop().finish == "never"
            if asked.request in self.aborted:
                text = text[: known + len(got)]
            assert [event.token for event in got] == text[known:], "the text is that of the request alone"
            assert [event.index for event in got] == list(range(known, len(text)))
            finishes = [event.finish for event in got]
            assert finishes[:-1] == [None] * (len(finishes) - 1)
            if asked.request not in self.aborted and not ends_in_the_midst:
                assert finishes[-1] == ("stop" if text[-1] == STOP else "length")
        assert self.engine.running == self.engine.waiting == 0
        assert self.engine.kv_usage == 0
        assert not self.pipeline.tables, "every sequence was freed at the stages"
        self.pipeline.integrity()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=share(480), stateful_step_count=40, deadline=None)

REQUESTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8)


@settings(max_examples=share(80), deadline=None)
@given(
    requests=REQUESTS,
    stages=st.integers(1, 3),
    pages=st.integers(8, 20),
    step=st.integers(5, 24),
    drafts=st.integers(0, 3),
)
def test_nobody_starves(requests: list[tuple[int, int, int]], stages: int, pages: int, step: int, drafts: int) -> None:
    """A request ends within the steps that it and those before it would take one after the other, each in all its positions' turns, and each
    token with as many drafts before it as a round has.
    """
    wish = Speculation("selfPrecision", drafts) if drafts else NO_SPECULATION
    engine = Engine(limits(wish, stages=stages, page_budget=pages, step=step, max_model_len=32))
    pipeline = Pipeline(engine)
    for number, (kind, length, answer) in enumerate(requests):
        engine.submit(submit(f"r{number}", prompt(kind, length), answer))
    ended: dict[str, int] = {}
    while len(ended) < len(requests):
        if not pipeline.step():
            ended |= {event.request: pipeline.steps for event in pipeline.result() if event.finish}
    bound = 0
    for number, (_, length, answer) in enumerate(requests):
        bound += (length + answer) * (stages + len(requests)) * (1 + drafts)
        assert ended[f"r{number}"] <= bound


@pytest.mark.parametrize("refill", [(0, 0), (1, 2)])
def test_a_replay_computes_what_lost_its_pages(refill: tuple[int, int]) -> None:
    """Two requests of one prompt, sixteen tokens of it in blocks: whoever is first fills them for both. What each had begun to fill is its own."""
    engine = Engine(limits())
    pipeline = Pipeline(engine)
    asked = [submit(f"r{number}", [*prompt(0, 16), 200 + number], 4, stop_tokens=[]) for number in range(2)]
    for each in asked:
        engine.submit(each)
    events = []
    while len(events) < 6:
        while pipeline.step():
            pass
        events += pipeline.result()
    after = Pipeline.after(pipeline, engine.scheduler.limits, refill=refill, small=SmallModel())
    for each in asked:
        got = [event.token for event in events if event.request == each.request]
        assert len(got) == 3
        after.engine.submit(structs.replace(each, delivered=got))
    later = after.drain()
    for each in asked:
        assert [event.token for event in events + later if event.request == each.request] == text_of(each)
    lacking = refill[0] < refill[1]
    assert after.refilled == (16 + 2 * 3 if lacking else 0)
    assert after.tokens_run - after.refilled == 2
    assert [event.found for event in later] == [19, 19]
    assert sum(event.refilled for event in later) == after.refilled


def resumed(count: int, refill: tuple[int, int]) -> Pipeline:
    """So many requests of their own prompts, each with its first token, in the next epoch."""
    engine = Engine(limits(page_budget=100, step=64))
    pipeline = Pipeline(engine)
    asked = [submit(f"r{number}", [100 + number, *prompt(1, 9)], 4, stop_tokens=[]) for number in range(count)]
    for each in asked:
        engine.submit(each)
    had: dict[str, int] = {}
    while len(had) < count:
        while len(pipeline.in_flight) < 2 and pipeline.step():
            pass
        had |= {event.request: event.token for event in pipeline.result() if not event.index}
    after = Pipeline.after(pipeline, engine.scheduler.limits, refill=refill, small=SmallModel())
    for each in asked:
        after.engine.submit(structs.replace(each, delivered=[had[each.request]]))
    return after


@pytest.mark.parametrize(("count", "first"), [(3, 3), (10, 10), (16, 16), (20, 16)])
def test_streams_that_go_on_are_in_one_step_as_far_as_it_has_room(count: int, first: int) -> None:
    """Of a plan whose micro-batches have four sequences, and room for the logits of sixteen. Afterwards there are as many as ever."""
    after = resumed(count, (0, 0))
    step = after.engine.next_step()
    assert step is not None
    assert [(each.length <= 4, each.sample) for each in step.segments] == [(True, 1)] * first
    after.accept(step)
    assert len(after.drain()) >= count


def test_of_streams_that_lack_layers_the_first_goes_on_before_the_others_are_filled() -> None:
    after = resumed(6, (1, 2))
    steps = []
    for _ in range(3):
        while len(after.in_flight) < 2 and (step := after.engine.next_step()):
            after.accept(step)
            steps.append((step.refill is not None, len(step.segments)))
        after.result()
    assert steps[:2] == [(True, 1), (False, 1)]
    assert steps[2][0]
    assert steps[2][1] > 1
    after.drain()


def test_of_streams_that_lack_layers_the_shortest_goes_on_first() -> None:
    """Of those with one priority: nobody else comes to lack any, so that none waits for ever."""
    engine = Engine(limits(page_budget=100, step=16))
    pipeline = Pipeline(engine)
    lengths = {"long": 25, "short": 9, "longer": 41, "urgent": 33}
    asked = [
        submit(name, [200 + number, *prompt(1, length)], 1, priority=-1 if name == "urgent" else 0)
        for number, (name, length) in enumerate(lengths.items())
    ]
    for each in asked:
        engine.submit(each)
    pipeline.drain()
    after = Pipeline.after(pipeline, engine.scheduler.limits, refill=(1, 2), small=SmallModel())
    for each in asked:
        after.engine.submit(each)
    assert [event.request for event in after.drain() if event.index == 0] == ["urgent", "short", "long", "longer"]


@pytest.mark.parametrize(("salt", "found"), [("mine", 16), ("", 0), ("yours", 0)])
def test_what_a_salt_keeps_apart_stays_apart_over_a_change_of_epoch(salt: str, found: int) -> None:
    engine = Engine(limits())
    pipeline = Pipeline(engine)
    engine.submit(submit("r0", prompt(0, 17), 1, salt="mine"))
    pipeline.drain()
    after = Pipeline.after(pipeline, engine.scheduler.limits, refill=(0, 0), small=SmallModel())
    after.engine.submit(submit("r1", prompt(0, 17), 1, salt=salt))
    assert [event.found for event in after.drain()] == [found]


def test_what_lacks_layers_is_not_handed_on_again() -> None:
    """Nor is what a step under way was to leave: a second loss finds what is whole alone."""
    engine = Engine(limits())
    pipeline = Pipeline(engine)
    engine.submit(submit("r0", prompt(0, 17), 1))
    pipeline.step()
    assert pipeline.kept() == []
    pipeline.drain()
    assert len(pipeline.kept()) == 4
    after = Pipeline.after(pipeline, engine.scheduler.limits, refill=(1, 2), small=SmallModel())
    assert not after.kept()
    after.engine.submit(submit("r0", prompt(0, 17), 1))
    after.step()
    assert not after.kept()
    after.result()
    assert len(after.kept()) == 4


def test_as_many_run_as_there_are_states() -> None:
    engine = Engine(limits(page_budget=64, sharing=0, state_slots=2, step=64, decode=8, prefill=8))
    pipeline = Pipeline(engine)
    for number in range(5):
        engine.submit(submit(f"r{number}", prompt(number, 3), 12))
    pipeline.step()
    assert (engine.running, engine.waiting) == (2, 3)
    assert sorted(event.request for event in pipeline.drain() if event.finish) == [f"r{number}" for number in range(5)]


def test_where_nobody_can_go_back_a_token_that_could_not_be_drawn_is_computed_from_the_start() -> None:
    engine = Engine(limits(sharing=0, state_slots=2))
    pipeline = Pipeline(engine)
    asked = submit("r0", prompt(0, 9), 4, sampling=grammar(2, 20))
    engine.submit(asked)
    events = pipeline.drain()
    assert [event.token for event in events] == text_of(asked)
    assert pipeline.tokens_run == 3 * 9 + len(events) - 1


def test_a_request_that_can_never_run_is_refused_with_its_numbers() -> None:
    engine = Engine(limits())
    with pytest.raises(RequestRefusedError, match=r"40 prompt tokens \+ max_tokens 20 = 60 exceed the 48 tokens"):
        engine.submit(submit("long", prompt(0, 40), 20))


def test_what_does_not_fit_waits_and_runs_when_blocks_are_free() -> None:
    engine = Engine(limits(page_budget=4, sharing=0))
    pipeline = Pipeline(engine)
    for number in range(3):
        engine.submit(submit(f"r{number}", prompt(number, 9), 3))
    pipeline.step()
    assert (engine.running, engine.waiting) == (1, 2)
    assert [event.request for event in pipeline.drain() if event.finish] == ["r0", "r1", "r2"]


def test_prompts_are_admitted_by_what_they_hold_and_not_by_what_may_follow() -> None:
    """Chats that say no max_tokens: all run at once, where the longest answer of each would take a quarter of the pool."""
    engine = Engine(limits(page_budget=64, max_model_len=64, step=64, decode=16))
    pipeline = Pipeline(engine)
    for number in range(16):
        engine.submit(submit(f"r{number}", prompt(number, 4), 60))
    pipeline.step()
    assert (engine.running, engine.waiting) == (16, 0)
    pipeline.drain()


def test_the_last_to_come_gives_its_blocks_back_and_is_computed_again() -> None:
    engine = Engine(limits(page_budget=6, sharing=0, stages=1))
    pipeline = Pipeline(engine)
    asked = [submit(f"r{number}", prompt(number, 8), 12, stop_tokens=[]) for number in range(2)]
    for each in asked:
        engine.submit(each)
    events = pipeline.drain()
    assert engine.scheduler.preemptions >= 1
    for each in asked:
        assert [event.token for event in events if event.request == each.request] == text_of(each)
    assert [event.request for event in events if event.finish] == ["r0", "r1"]


def test_a_prefix_is_computed_once() -> None:
    """Sixteen requests that come together: what they share is computed by one of them, whichever is there first."""
    shared = prompt(0, 40)
    run = {}
    for sharing in (0, 1):
        engine = Engine(limits(page_budget=400, max_model_len=64, step=32, prefill=4, sharing=sharing))
        pipeline = Pipeline(engine)
        for number in range(16):
            engine.submit(submit(f"r{number}", [*shared, 200 + number], 1))
        events = pipeline.drain()
        run[sharing] = pipeline.tokens_run
        assert sum(event.found for event in events) == sharing * 15 * 40
    assert run == {0: 16 * 41, 1: 16 * 41 - 15 * 40}


def test_a_prefix_is_found_after_its_request_and_until_its_blocks_are_needed() -> None:
    engine = Engine(limits(page_budget=12))
    pipeline = Pipeline(engine)

    def found(name: str, kind: int) -> int:
        engine.submit(submit(name, prompt(kind, 17), 1))
        (event,) = pipeline.drain()
        return event.found

    assert [found("r0", 0), found("r1", 0), found("r2", 1), found("r3", 0)] == [0, 16, 0, 16]
    assert [found("r4", 2), found("r5", 0), found("r6", 1)] == [0, 16, 12], (
        "the last block of the prefix unused longest"
    )


def test_other_salts_share_nothing() -> None:
    engine = Engine(limits())
    pipeline = Pipeline(engine)
    found = []
    for number, salt in enumerate(["", "a", "a", ""]):
        engine.submit(submit(f"r{number}", prompt(0, 17), 1, salt=salt))
        found.extend(event.found for event in pipeline.drain())
    assert found == [0, 0, 16, 16]


def test_a_small_prompt_passes_a_large_one() -> None:
    engine = Engine(limits(page_budget=1000, max_model_len=2000, step=32, prefill=1, stages=1))
    pipeline = Pipeline(engine)
    engine.submit(submit("r0", prompt(0, 1000), 1))
    pipeline.step()
    pipeline.result()
    engine.submit(submit("r1", prompt(1, 5), 1))
    pipeline.step()
    assert [event.request for event in pipeline.result()] == ["r1"]


def test_a_small_prompt_passes_a_large_one_also_beside_streams_that_bear_little() -> None:
    engine = Engine(limits(page_budget=1000, max_model_len=2000, step=128, stages=1, page_tokens=16))
    pipeline = Pipeline(engine, row_seconds=0.1)  # a stream's step takes as long as a token of a prompt
    lengths: list[int] = []

    def step() -> list[str]:
        taken = engine.next_step()
        assert taken is not None
        lengths.append(sum(segment.length for segment in taken.segments))
        pipeline.accept(taken)
        return [event.request for event in pipeline.result()]

    engine.submit(submit("r0", prompt(2, 3), 1500, stop_tokens=[]))
    for _ in range(20):
        step()
    engine.submit(submit("r1", prompt(0, 1000), 1))
    for _ in range(20):
        step()
    assert set(lengths[-15:]) == {1 + FEWEST_TOKENS}
    engine.submit(submit("r2", prompt(1, 10), 1))
    assert "r2" in step()
    assert lengths[-1] == 1 + 10 + 14 // 2  # all of it, and half of what is left of the other's block
    for _ in range(5):
        assert step() == ["r0"]


def test_a_large_prompt_moves_whatever_passes_it() -> None:
    engine = Engine(limits(page_budget=1000, max_model_len=2000, step=32, stages=1))
    pipeline = Pipeline(engine)
    engine.submit(submit("r0", prompt(0, 400), 1))
    for number in range(1, 400 // (32 // 4) + 1):
        engine.submit(submit(f"r{number}", [5 * number, *prompt(1, 27)], 1))
        pipeline.step()
        if any(event.request == "r0" for event in pipeline.result()):
            return
    raise AssertionError("a quarter of every step was its part")


def test_of_equal_priority_the_earliest_deadline_goes_first() -> None:
    engine = Engine(limits(page_budget=8, stages=1))
    pipeline = Pipeline(engine)
    for number, (priority, deadline) in enumerate([(0, math.inf), (0, 9.0), (0, 5.0), (1, 1.0), (0, 9.0)]):
        engine.submit(submit(f"r{number}", prompt(number, 20), 4, priority=priority, deadline=deadline))
    assert [event.request for event in pipeline.drain() if event.finish] == ["r2", "r1", "r4", "r0", "r3"]
    with pytest.raises(RequestRefusedError, match="deadline is not a number"):
        engine.submit(submit("never", prompt(0, 4), 4, deadline=math.nan))


def test_of_prompts_that_need_as_little_the_first_in_rank_goes_first_and_then_who_was_sent_first() -> None:
    engine = Engine(limits(stages=1, step=3, prefill=8, page_budget=64))
    for number, deadline in enumerate([9.0, 8.0, 7.0, 6.0]):
        engine.submit(submit(f"r{number}", prompt(number, 1), 4, deadline=deadline))
    step = engine.next_step()
    assert step is not None
    assert sorted(engine.requests_of([each.sequence for each in step.segments])) == ["r0", "r1", "r3"]


def test_a_higher_priority_goes_first() -> None:
    engine = Engine(limits(page_budget=8, sharing=0))
    for number, priority in enumerate([0, 0, -1]):
        engine.submit(submit(f"r{number}", prompt(number, 20), 4, priority=priority))
    finished = [event.request for event in Pipeline(engine).drain() if event.finish]
    assert finished[0] == "r2"


def test_decoding_sequences_are_shared_out_over_the_stages() -> None:
    engine = Engine(limits(stages=2, decode=8, prefill=8, step=64, page_budget=64))
    pipeline = Pipeline(engine)
    for number in range(8):
        engine.submit(submit(f"r{number}", prompt(number, 3), 12, stop_tokens=[]))
    sizes = []
    for _ in range(10):
        while (step := engine.next_step()) is not None:
            pipeline.accept(step)
            if all(segment.length == 1 for segment in step.segments):
                sizes.append(len(step.segments))
        pipeline.result()
    assert sizes[-1] == 4, "two micro-batches of four keep both stages busy"


def test_a_stop_token_ends_a_sequence() -> None:
    engine = Engine(limits(stages=1))
    engine.submit(submit("a", prompt(0, 3), 4))
    step = engine.next_step()
    assert step is not None
    [event] = engine.take(StepResult(0, 1, 0, [SampledToken(0, 2, STOP, 0.0, [])]))
    assert (event.index, event.finish) == (0, "stop")
    freed = engine.next_step()
    assert freed is not None
    assert freed.operations == [Free(0)]
    assert not freed.segments


def test_the_same_request_twice_runs_once() -> None:
    engine = Engine(limits())
    asked = submit("r0", prompt(0, 3), 4)
    engine.submit(asked)
    engine.submit(asked)
    assert [event.token for event in Pipeline(engine).drain()] == text_of(asked)


def test_an_unasked_result_is_an_error() -> None:
    with pytest.raises(StepError, match="no step was in flight"):
        Engine(limits()).take(StepResult(0, 1, 0, []))


@pytest.mark.parametrize(
    ("prompt", "delivered"), [([], []), ([5, 50], []), ([-1], []), ([5], [2**40]), ([5], [6, 7, 8, 9])]
)
def test_what_the_embedding_has_no_row_for_never_enters_a_step(prompt: list[int], delivered: list[int]) -> None:
    engine = Engine(dataclasses.replace(limits(), vocabulary=50))
    with pytest.raises(RequestRefusedError, match="all from 0 to 49"):
        engine.submit(Submit("a", prompt, delivered, 4, [], Sampling()))
    assert engine.next_step() is None


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=math.nan),
        Sampling(temperature=-1),
        Sampling(top_p=2),
        Sampling(min_p=-0.1),
        Sampling(logprobs=21),
        Sampling(rules=LogitRules(repetition_penalty=0)),
        Sampling(rules=LogitRules(presence_penalty=math.inf)),
        Sampling(rules=LogitRules(bias=((2**31, 1.0),))),
        Sampling(rules=LogitRules(bias=((1, math.nan),))),
        Sampling(rules=LogitRules(bad_words=((),))),
        Sampling(rules=LogitRules(bad_words=((1,) * 65,))),
        Sampling(rules=LogitRules(bad_words=((1,),) * 257)),
        Sampling(rules=LogitRules(ends=(-1,))),
        Sampling(rules=LogitRules(grammar=Grammar("regex", "a", ()))),
        Sampling(rules=LogitRules(grammar=Grammar("regex", "a" * 2**19, (1,)))),
    ],
)
def test_what_no_stage_could_sample_never_enters_a_step(sampling: Sampling) -> None:
    engine = Engine(limits())
    with pytest.raises(RequestRefusedError, match="tokens cannot be drawn so"):
        engine.submit(Submit("a", [1, 2], [], 4, [], sampling))
    assert engine.next_step() is None


def test_what_other_weights_computed_is_given_back_before_a_token_follows_from_it() -> None:
    """Requests that found blocks between the change and the first result that tells of it."""
    engine = Engine(limits(stages=3, page_budget=64))
    pipeline = Pipeline(engine)
    engine.submit(submit("r0", prompt(0, 17), 1))
    pipeline.drain()
    pipeline.weights += 1
    for number in (1, 2):
        engine.submit(submit(f"r{number}", [*prompt(0, 17), number], 3, stop_tokens=[]))
        pipeline.step()
    assert all(each.found == 16 for each in engine.scheduler.running.values()), "nobody knows of the change yet"
    events = [event for _ in range(2) for event in pipeline.result()]
    assert events == []
    events = pipeline.drain()
    assert len(events) == 6
    assert {event.found for event in events if event.request == "r1"} == {0}


def test_a_sequence_that_gave_its_blocks_back_waits_for_its_own_token() -> None:
    """Computed again without it, it would be sampled twice."""
    engine = Engine(limits(stages=3, page_budget=6, sharing=0, decode=1))
    pipeline = Pipeline(engine)
    asked = [submit(f"r{number}", prompt(number, 7), 12, stop_tokens=[]) for number in range(3)]
    for each in asked:
        engine.submit(each)
    events, waited = pipeline.drain_watching(lambda: any(each.awaited for each in engine.scheduler.waiting))
    assert waited, "one was driven out while its token was on the way"
    for each in asked:
        assert [event.token for event in events if event.request == each.request] == text_of(each)
        assert [event.index for event in events if event.request == each.request] == list(range(12))
