"""KV stays where its layer and its leader stay: a slot is lost, its neighbours take over, and only what lost its pages is computed again."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from strata_planner.contract.control import GetStatus
from strata_planner.contract.frames import Sampling, Submit
from strata_planner.contract.plan import Plan
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
        while sum(map(len, self.tokens.values())) < count:
            for event in leader.events():
                assert event.index == len(self.tokens[event.request]), "a token twice, or none"
                self.tokens[event.request].append(event.token)

    @property
    def all(self) -> int:
        return ANSWER * len(self.tokens)


def plan_of(model: Path, slots: Sequence[str], *, log: bool, pages: int = 64) -> Plan:
    return structs.replace(even_plan(model, slots, pages=pages), boundary_log=log)


def drained(streams: Streams, leader: LeaderClient) -> None:
    while leader.heard(0.2):
        for event in leader.events():
            streams.tokens[event.request].append(event.token)


def refilled(pipeline: PipelineHarness, plan: Plan) -> int:
    return sum(pipeline.slots[each.slot].ask(GetStatus()).roles[0].refilled for each in plan.replicas[0].stages)


def prefilled(pipeline: PipelineHarness, plan: Plan) -> int:
    return pipeline.slots[plan.replicas[0].stages[0].slot].ask(GetStatus()).roles[0].prefill_tokens


@pytest.mark.parametrize("log", [False, True], ids=["from the tokens", "from the log"])
@pytest.mark.parametrize(("lost", "survivors"), [("b", "ac"), ("c", "ab"), ("a", "bc")])
def test_neighbours_take_over(tiny_llama: Path, lost: str, survivors: str, *, log: bool) -> None:
    submits = asked(1)
    with PipelineHarness("abc") as pipeline:
        three = plan_of(tiny_llama, "abc", log=log)
        expected = Streams(submits)
        leader = pipeline.serve(three)
        expected.send(leader)
        expected.listen(leader, expected.all)
    with PipelineHarness("abc") as pipeline:
        leader = pipeline.serve(three)
        streams = Streams(submits)
        streams.send(leader)
        streams.listen(leader, streams.all // 2)
        pipeline.threads[lost].close()
        if lost != "a":
            drained(streams, leader)
        two = plan_of(tiny_llama, survivors, log=log)
        leader = pipeline.serve(two)
        streams.send(leader)
        streams.listen(leader, streams.all)
        assert streams.tokens == expected.tokens
        cached = sum(len(each.prompt) for each in submits)
        print(lost, log, "refilled", refilled(pipeline, two), "prefilled", prefilled(pipeline, two), "prompts", cached)
        del pipeline.slots[lost]
