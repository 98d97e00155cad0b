"""The simulator's scheduler and routing are the engine's and the gateway's: both run side by side on the same requests."""

from collections import deque

from hypothesis import example, given
from hypothesis import strategies as st

from strata_planner.contract.frames import SampledToken, Sampling, StepResult, Submit
from strata_planner.contract.plan import MicroBatch
from strata_planner.simulate import Batch, Chunk, Limits, ReplicaLoad, Request, least_loaded
from strata_planner.simulate.scheduler import Scheduler, Sequence
from strata_runtime.gateway.routing import routing
from strata_runtime.scheduler.engine import Engine
from strata_runtime.scheduler.scheduler import Limits as EngineLimits

requests = st.lists(
    st.builds(Request, st.just(0.0), st.integers(1, 60), st.integers(1, 12), st.integers(0, 40)),
    min_size=1,
    max_size=15,
)


STOP = 2


class Pair:
    """An engine and the simulator's scheduler, given the same requests and the same results."""

    def __init__(self, micro_batch: MicroBatch, stages: int, pages: int, state_slots: int) -> None:
        self.engine = Engine(
            EngineLimits(stages, micro_batch, 16, pages, 10_000, sharing=False, state_slots=state_slots)
        )
        self.scheduler = Scheduler(Limits(micro_batch, 16, pages, 10_000, state_slots), stages)
        self.flight: deque[tuple[StepResult, Batch, list[Sequence]]] = deque()
        self.stages = stages
        self.finished = 0

    def submit(self, number: int, request: Request) -> None:
        prompt = [0] * request.prompt_tokens
        most = request.longest - request.prompt_tokens
        self.engine.submit(Submit(str(number), prompt, [], most, [STOP], Sampling(temperature=0)))
        self.scheduler.add(Sequence(number, request))

    def step(self) -> bool:
        """One step of both, compared; False where there is none."""
        step = self.engine.next_step()
        chosen = self.scheduler.next_batch() if len(self.flight) < self.stages else None
        if step is None or not step.segments:
            assert chosen is None
            return False
        assert chosen is not None
        batch, sampled = chosen
        decoding = step.segments[: batch.decoding]
        assert [segment.sample for segment in decoding] == [1] * batch.decoding
        assert sum(segment.start + 1 for segment in decoding) == batch.decode_keys
        assert [Chunk(each.length, each.start) for each in step.segments[batch.decoding :]] == list(batch.chunks)
        assert [each.sequence for each in step.segments if each.sample] == [each.number for each in sampled]
        assert len(step.token_ids) == batch.tokens
        assert self.engine.scheduler.held_blocks == self.scheduler.held_blocks
        assert self.engine.scheduler.preemptions == self.scheduler.preemptions
        tokens = [
            SampledToken(
                s.sequence,
                s.start + s.length - 1,
                STOP if own.produced + 1 == own.request.output_tokens else 1,
                0.0,
                [],
            )
            for s, own in zip((s for s in step.segments if s.sample), sampled, strict=True)
        ]
        seconds = 0.1 + 0.001 * batch.decoding + 0.004 * (batch.tokens - batch.decoding)
        self.flight.append((StepResult(0, 1, step.step, tokens, seconds=seconds), batch, sampled))
        return True

    def take(self) -> None:
        result, batch, sampled = self.flight.popleft()
        self.engine.take(result)
        self.scheduler.pace.learn(batch.decoding, batch.tokens - batch.decoding, result.seconds)
        for sequence in sampled:
            sequence.produced += 1
            if sequence.produced == sequence.request.output_tokens:
                self.scheduler.remove(sequence)
                self.finished += 1
            else:
                self.scheduler.take(sequence)


# The only one that is picked gives its own blocks back: another that is ready has its turn.
@example([Request(0.0, 43, 8, 0), Request(0.0, 13, 6, 0), Request(0.0, 47, 3, 0)], 1, 1, 1, 16, 0, 0.0, 0, [])
# Two would fit where one may run.
@example([Request(0.0, 20, 3, 0)] * 2, 1, 2, 2, 40, 1, 0.0, 0, ["submit", "submit", "step"])
@given(
    requests,
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(6, 40),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([0.0, 0.5, 6.0]),
    st.sampled_from([0, 0, 7, 30]),
    st.lists(st.sampled_from(["submit", "step", "take"]), max_size=60),
)
def test_steps_are_the_engines(
    listed: list[Request],
    stages: int,
    prefill: int,
    decode: int,
    tokens: int,
    state_slots: int,
    brought: float,
    least: int,
    order: list[str],
) -> None:
    micro_batch = MicroBatch(prefill, decode, tokens, prompts_per_token=brought, least_prompt_tokens=least)
    pair = Pair(micro_batch, stages, 9, state_slots)
    waiting = deque(enumerate(listed))
    for what in order:
        if what == "submit" and waiting:
            pair.submit(*waiting.popleft())
        elif what == "take" and pair.flight:
            pair.take()
        else:
            pair.step()
    while waiting or pair.flight or pair.finished < len(listed):
        if waiting:
            pair.submit(*waiting.popleft())
        if not pair.step():
            pair.take()


@given(st.integers(2, 4), st.floats(1.0, 8.0), st.data())
def test_steps_with_and_without_a_stream_take_as_much_of_a_prompt(
    stages: int, brought: float, data: st.DataObject
) -> None:
    """So that none of two neighbours in a pipeline waits for the other."""
    streams = data.draw(st.integers(1, stages - 1))
    scheduler = Scheduler(Limits(MicroBatch(1, 4, 512, prompts_per_token=brought), 16, 1000, 1000), stages)
    flight = deque[list[Sequence]]()

    def step() -> Batch | None:
        batch, sampled = scheduler.next_batch() or (None, [])
        flight.append(sampled)
        for each in flight.popleft() if len(flight) == stages else ():
            each.produced += 1
            scheduler.take(each)
        return batch

    for number in range(streams):
        scheduler.add(Sequence(number, Request(0.0, 1, 500)))
    for _ in range(3 * stages):
        step()
    for rows, tokens in ((1, 0), (1, 64)) * 40:
        scheduler.pace.learn(rows, tokens, 0.1 + 0.1 * tokens)  # the pace allows next to nothing
    scheduler.add(Sequence(streams, Request(0.0, 400, 1)))
    steps = [batch for batch in (step() for _ in range(4 * stages)) if batch]
    assert {batch.decoding > 0 for batch in steps} == {True, False}
    chunks = [sum(each.tokens for each in batch.chunks) for batch in steps]
    assert max(chunks) - min(chunks) <= 1


loads = st.lists(
    st.tuples(st.floats(0, 100), st.integers(0, 50), st.sampled_from([0.0, 0.5, 0.949, 0.95, 1.0])),
    min_size=1,
    max_size=6,
)


@given(loads)
def test_routing_is_the_gateways(listed: list[tuple[float, int, float]]) -> None:
    mine = least_loaded([ReplicaLoad(place, *each) for place, each in enumerate(listed)])
    assert mine == routing.choose(routing.ReplicaLoad(place, *each) for place, each in enumerate(listed))
