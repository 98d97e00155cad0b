"""Requests that outlive epochs, and the plans that these are of: what tests of pages over a change of epoch share."""

import random
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from strata_planner.contract.control import GetStatus
from strata_planner.contract.frames import Sampling, StepResult, Submit, TokenEvent
from strata_planner.contract.plan import Plan
from strata_runtime.slot.leader import LeaderWorker
from strata_runtime.wire.client import LeaderClient
from tests.runtime.plans import even_plan
from tests.runtime.slot.harness import PipelineHarness

ANSWER = 24


def asked(seed: int, count: int = 6) -> list[Submit]:
    """Ragged prompts, some with a prefix in common; greedy and drawn."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 60) for _ in range(40)]
    submits = []
    for number in range(count):
        prompt = shared[: draw.choice([0, 33, 40])] + [draw.randrange(3, 60) for _ in range(draw.choice([1, 17, 30]))]
        sampling = Sampling(temperature=number % 2 * 0.9, seed=number)
        submits.append(Submit(f"r{number}", prompt, [], ANSWER, [], sampling))
    return submits


class Streams:
    """Requests that outlive epochs."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        self.submits = {each.request: each for each in submits}
        self.tokens: dict[str, list[int]] = {each.request: [] for each in submits}

    def send(self, leader: LeaderClient) -> None:
        for name, got in self.tokens.items():
            if len(got) < ANSWER:
                leader.send(structs.replace(self.submits[name], delivered=list(got)))

    def listen(self, leader: LeaderClient, count: int) -> None:
        """Until there are so many tokens."""
        while self.count < count:
            for event in leader.events():
                assert event.index == len(self.tokens[event.request]), "a token twice, or none"
                self.tokens[event.request].append(event.token)

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def all(self) -> int:
        return ANSWER * len(self.tokens)


def plan_of(model: Path, slots: Sequence[str], *, log: bool, pages: int = 64, logged: int = 64) -> Plan:
    """`logged`: pages of which stages keep what they hand on, with a `log`."""
    return structs.replace(even_plan(model, slots, pages=pages), boundary_log_pages=logged if log else 0)


def drained(streams: Streams, leader: LeaderClient) -> None:
    while leader.heard(0.2):
        for event in leader.events():
            streams.tokens[event.request].append(event.token)


def bound(pipeline: PipelineHarness, plan: Plan, tokens: int) -> None:
    """Its leader makes no more steps once so many tokens are out: else short answers would end before the next epoch is there."""
    running = pipeline.threads[plan.replicas[0].stages[0].slot].slot._running
    assert running is not None
    worker = running.roles[0].worker
    assert isinstance(worker, LeaderWorker)
    engine, out = worker.engine, 0
    next_step, take = engine.next_step, engine.take

    def counted(result: StepResult) -> list[TokenEvent]:
        nonlocal out
        events = take(result)
        out += len(events)
        return events

    engine.take = counted  # type: ignore[method-assign]
    engine.next_step = lambda: None if out >= tokens else next_step()  # type: ignore[method-assign]


def computed_again(pipeline: PipelineHarness, plan: Plan) -> int:
    """Tokens x layers of what had been kept."""
    return sum(pipeline.slots[each.slot].ask(GetStatus()).roles[0].refilled for each in plan.replicas[0].stages)


def with_layers(plan: Plan, *ends: int) -> Plan:
    """The same with other layers for its stages: up to each of these."""
    starts = [0, *(end + 1 for end in ends[:-1])]
    (replica,) = plan.replicas
    stages = tuple(
        structs.replace(
            stage, layers=(first, last), bits=(16,) * (last - first + 1), format=("dense",) * (last - first + 1)
        )
        for stage, first, last in zip(replica.stages, starts, ends, strict=True)
    )
    return structs.replace(plan, replicas=(structs.replace(replica, stages=stages),))


def undisturbed(model: Path) -> dict[str, list[int]]:
    """The tokens of all, without a change."""
    with PipelineHarness("a") as pipeline:
        streams = Streams(asked(1))
        leader = pipeline.serve(plan_of(model, "a", log=False))
        streams.send(leader)
        streams.listen(leader, streams.all)
        return streams.tokens
