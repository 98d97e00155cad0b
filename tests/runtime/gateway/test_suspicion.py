"""The law of suspects: one poisonous request among any others ends after three failed steps, and the others finish."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import (
    Abort,
    SampledToken,
    Sampling,
    StepFailure,
    StepResult,
    Submit,
    TokenEvent,
    Tokens,
)
from strata_planner.contract.plan import MicroBatch
from strata_runtime.gateway.routing.journal import GenerationRequest, Journal, Outgoing
from strata_runtime.gateway.routing.suspicion import FORGIVEN_TOKENS, MOST_FAILED_STEPS, Record
from strata_runtime.scheduler.engine import Engine, Step
from strata_runtime.scheduler.scheduler import Limits
from tests.laws import share

POISON = "poison"


class Deployment:
    """A journal before an engine whose steps fail when they compute the poisonous request's position `at` or a later one."""

    def __init__(self, stages: int, at: int) -> None:
        self.limits = Limits(stages, MicroBatch(prefill=4, decode=8, max_step_tokens=16), 4, 400, 100, 1000)
        self.at = at
        self.journal = Journal()
        self.engine = Engine(self.limits)
        self.answers: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self.failures: list[list[str]] = []
        self.journal.start_epoch(1)

    def ask(self, name: str, prompt: int, answer: int) -> None:
        self.answers[name] = []
        self.carry(self.journal.submit(GenerationRequest(name, (5,) * prompt, answer, (), Sampling()), 0))

    def carry(self, messages: list[Outgoing]) -> None:
        for outgoing in messages:
            match outgoing.message:
                case Submit() as submit:
                    self.engine.submit(submit)
                case Abort(name):
                    self.engine.abort(name)

    def run(self) -> None:
        """Steps until all is answered; a step that fails ends the epoch."""
        in_flight: deque[Step] = deque()
        for _ in range(2000):
            while (step := self.engine.next_step()) is not None:
                if step.segments:
                    in_flight.append(step)
            if not in_flight:
                return
            if not self.compute(in_flight.popleft()):
                in_flight.clear()
        raise AssertionError("it does not come to an end")

    def compute(self, step: Step) -> bool:
        names = [self.engine.requests_of([segment.sequence]) for segment in step.segments]
        for name, segment in zip(names, step.segments, strict=True):
            if name and name[0].startswith(POISON) and segment.start + segment.length > self.at:
                self.fail([one for each in names for one in each], len(step.segments))
                return False
        sampled = [SampledToken(s.sequence, s.start + s.length - 1, 7, 0.0, []) for s in step.segments if s.sample]
        self.deliver(self.engine.take(StepResult(0, self.journal.epoch, step.step, sampled)))
        return True

    def deliver(self, events: list[TokenEvent]) -> None:
        delivery = self.journal.deliver(0, Tokens(0, self.journal.epoch, events, 0, 0, 0.0))
        for name, event in delivery.events:
            self.answers[name].append(event.token)
        self.carry(delivery.outgoing)

    def fail(self, names: list[str], carried: int) -> None:
        self.failures.append([name.partition("#")[0] for name in names])
        ended, _ = self.journal.step_failed(StepFailure(0, self.journal.epoch, names, carried, "broken"))
        for name in ended:
            self.journal.finish(name)
        self.ended += ended
        self.engine = Engine(self.limits)
        self.journal.start_epoch(self.journal.epoch + 1)
        for name in self.journal.held():
            self.carry(self.journal.replay(name, 0))


@settings(max_examples=share(60), deadline=None)
@given(
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), max_size=8),
    place=st.integers(0, 8),
    prompt=st.integers(1, 40),
    further=st.integers(0, 11),
    in_prompt=st.booleans(),
    stages=st.integers(1, 3),
)
def test_one_poisonous_request_ends_alone(
    others: list[tuple[int, int]], place: int, prompt: int, further: int, *, in_prompt: bool, stages: int
) -> None:
    """It may be its prompt that no stage can compute, or a token that it comes to later."""
    deployment = Deployment(stages, at=further % prompt if in_prompt else prompt + further % 11)
    wanted = {f"r{number}": other for number, other in enumerate(others)}
    names = list(wanted)
    names.insert(place % (len(names) + 1), POISON)
    for name in names:
        deployment.ask(name, *wanted.get(name, (prompt, 12)))
    deployment.run()
    assert deployment.ended == [POISON]
    assert len(deployment.failures) == MOST_FAILED_STEPS
    assert [names for names in deployment.failures[1:] if names != [POISON]] == [], "suspects are tried alone"
    assert {name: len(deployment.answers[name]) for name in wanted} == {name: one[1] for name, one in wanted.items()}
    assert len(deployment.journal) == 0


@given(steps=st.lists(st.sampled_from([0, -40, -FORGIVEN_TOKENS, 1, 2, 9]), max_size=12))
def test_company_is_forgiven_by_a_token_and_what_failed_alone_by_many(steps: list[int]) -> None:
    """0: a token came; below: so many; else: a step with so many requests failed."""
    record, alone, since, tokens = Record(), 0, 0, 0
    for carried in steps:
        came = max(1, -carried) if carried <= 0 else 0
        record = record.failed(carried) if carried > 0 else record
        for _ in range(came):
            record = record.progressed()
        tokens = tokens + came if carried <= 0 else 0
        alone = 0 if tokens >= FORGIVEN_TOKENS else alone + (carried == 1)
        since = since + (carried > 1) if carried > 0 else 0
        assert record.is_suspect == (alone + since > 0)
        assert record.is_over == (alone + since >= MOST_FAILED_STEPS)


def test_a_suspect_that_runs_elsewhere_in_company_is_taken_back() -> None:
    """Its leader's connection broke before the word of the failed step came."""
    journal = Journal()
    journal.start_epoch(1)
    journal.submit(GenerationRequest("r", (1,), 5, (), Sampling()), 0)
    journal.hold(0)
    journal.replay("r", 1)
    assert journal.step_failed(StepFailure(0, 1, ["r", "unknown"], 2, "broken")) == ([], [Outgoing(1, Abort("r#2"))])
    [again] = journal.replay("r", 1)
    assert isinstance(again.message, Submit)
    assert again.message.alone
