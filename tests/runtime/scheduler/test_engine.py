"""The engine's laws, over an in-memory pipeline that returns results in order: every request gets its tokens, once."""

import dataclasses
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import Free, Open, SampledToken, Sampling, StepResult, Submit, TokenEvent
from strata_planner.contract.plan import MicroBatch
from strata_runtime.errors import RequestRefusedError, StepError
from strata_runtime.scheduler.engine import Engine, Step
from strata_runtime.scheduler.scheduler import Limits
from tests.laws import share

STOP = 7


def limits(**changes: int) -> Limits:
    values = {
        "stages": 2,
        "prefill": 2,
        "decode": 4,
        "step": 16,
        "page_tokens": 4,
        "page_budget": 16,
        "max_model_len": 48,
    }
    values |= changes
    return Limits(
        under_way=values["stages"],
        micro_batch=MicroBatch(prefill=values["prefill"], decode=values["decode"], max_step_tokens=values["step"]),
        page_tokens=values["page_tokens"],
        page_budget=values["page_budget"],
        max_model_len=values["max_model_len"],
    )


def submit(name: str, prompt: int = 3, answer: int = 4, delivered: tuple[int, ...] = ()) -> Submit:
    return Submit(name, list(range(100, 100 + prompt)), list(delivered), answer, [STOP], Sampling(temperature=0))


class Pipeline:
    """Checks every step as the stages would and answers with made-up tokens: 1000 + position."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.in_flight: deque[Step] = deque()
        self.lengths: dict[int, int] = {}
        self.freed: list[int] = []  # how long each sequence was when it was freed
        self.next_step = 0

    def accept(self, step: Step) -> None:
        assert step.step == self.next_step
        self.next_step += 1
        for operation in step.operations:
            if isinstance(operation, Open):
                self.lengths[operation.sequence] = 0
            if isinstance(operation, Free):
                self.freed.append(self.lengths.pop(operation.sequence))
        assert len(step.token_ids) == sum(segment.length for segment in step.segments)
        for segment in step.segments:
            assert self.lengths[segment.sequence] == segment.start, "positions are computed once and in order"
            self.lengths[segment.sequence] += segment.length
        allowed = self.engine.scheduler.limits
        assert len(step.token_ids) <= allowed.micro_batch.max_step_tokens
        assert sum(allowed.pages(length) for length in self.lengths.values()) <= allowed.page_budget
        if step.segments:
            self.in_flight.append(step)
            assert len(self.in_flight) <= allowed.under_way

    def result(self) -> list[TokenEvent]:
        step = self.in_flight.popleft()
        tokens = [
            SampledToken(s.sequence, s.start + s.length - 1, 1000 + s.start + s.length - 1, 0.0, [])
            for s in step.segments
            if s.sample
        ]
        return self.engine.take(StepResult(0, 1, step.step, tokens))

    def drain(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for _ in range(10_000):
            while (step := self.engine.next_step()) is not None:
                self.accept(step)
            if not self.in_flight:
                return events
            events.extend(self.result())
        raise AssertionError("the engine does not come to an end")


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 18), st.integers(0, 5)), min_size=1, max_size=8)


@settings(max_examples=share(80), deadline=None)
@given(
    requests=requests,
    stages=st.integers(1, 4),
    step=st.integers(5, 24),
    decode=st.integers(1, 4),
    aborted=st.sets(st.integers(0, 7)),
    steps_before_abort=st.integers(0, 6),
)
def test_every_request_gets_all_its_tokens_in_order(
    requests: list[tuple[int, int, int]],
    stages: int,
    step: int,
    decode: int,
    aborted: set[int],
    steps_before_abort: int,
) -> None:
    engine = Engine(limits(stages=stages, step=step, decode=decode))
    pipeline = Pipeline(engine)
    expected: dict[str, list[int]] = {}
    for number, (prompt, answer, already) in enumerate(requests):
        delivered = min(already, answer - 1)
        engine.submit(submit(f"r{number}", prompt, answer, tuple(range(delivered))))
        expected[f"r{number}"] = [1000 + prompt + index - 1 for index in range(delivered, answer)]
    events: list[TokenEvent] = []
    for _ in range(steps_before_abort):
        if (next_step := engine.next_step()) is not None:
            pipeline.accept(next_step)
        elif pipeline.in_flight:
            events.extend(pipeline.result())
    for number in aborted:
        engine.abort(f"r{number}")
    events.extend(pipeline.drain())
    for number, (_, answer, _) in enumerate(requests):
        name = f"r{number}"
        got = [event for event in events if event.request == name]
        tokens = [event.token for event in got]
        if number in aborted:
            assert tokens == expected[name][: len(tokens)]
            continue
        assert tokens == expected[name]
        assert [event.index for event in got] == list(range(answer - len(tokens), answer))
        assert [event.finish for event in got] == [None] * (len(tokens) - 1) + ["length"]
    computed = Counter(
        prompt + answer - 1 for number, (prompt, answer, _) in enumerate(requests) if number not in aborted
    )
    assert computed <= Counter(pipeline.freed), "each position but the last token's is computed once, none beyond"
    assert engine.running == engine.waiting == 0
    assert engine.kv_usage == 0
    assert not pipeline.lengths, "every sequence was freed at the stages"


def test_a_request_that_can_never_run_is_refused_with_its_numbers() -> None:
    engine = Engine(limits())
    with pytest.raises(RequestRefusedError, match=r"40 prompt tokens \+ max_tokens 20 = 60 exceed the 48 tokens"):
        engine.submit(submit("long", prompt=40, answer=20))


def test_what_does_not_fit_waits_and_runs_when_pages_are_free() -> None:
    engine = Engine(limits(page_budget=4))
    pipeline = Pipeline(engine)
    for name in "abc":
        engine.submit(submit(name, prompt=8, answer=4))
    assert engine.next_step() is not None
    assert (engine.running, engine.waiting) == (1, 2)
    engine = Engine(limits(page_budget=4))
    pipeline = Pipeline(engine)
    for name in "abc":
        engine.submit(submit(name, prompt=8, answer=4))
    assert [event.request for event in pipeline.drain() if event.finish] == ["a", "b", "c"]


def test_decoding_sequences_are_shared_out_over_the_stages() -> None:
    engine = Engine(limits(stages=2, decode=8, prefill=8, step=64, page_budget=64))
    pipeline = Pipeline(engine)
    for number in range(8):
        engine.submit(submit(f"r{number}", answer=12))
    sizes = []
    for _ in range(12):
        while (step := engine.next_step()) is not None:
            pipeline.accept(step)
            if all(segment.length == 1 for segment in step.segments):
                sizes.append(len(step.segments))
        pipeline.result()
    assert sizes[-1] == 4, "two micro-batches of four keep both stages busy"


def test_a_stop_token_ends_a_sequence() -> None:
    engine = Engine(limits(stages=1))
    engine.submit(submit("a"))
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
    engine.submit(submit("a"))
    engine.submit(submit("a"))
    assert [event.index for event in Pipeline(engine).drain()] == [0, 1, 2, 3]


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
    "sampling", [Sampling(temperature=float("nan")), Sampling(temperature=-1), Sampling(top_p=2), Sampling(logprobs=21)]
)
def test_what_no_stage_could_sample_never_enters_a_step(sampling: Sampling) -> None:
    engine = Engine(limits())
    with pytest.raises(RequestRefusedError, match="tokens cannot be drawn so"):
        engine.submit(Submit("a", [1, 2], [], 4, [], sampling))
    assert engine.next_step() is None
