"""A pipeline that is never empty: what the formula says is what the simulator's engine does, and no better machine does worse."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.plan import MicroBatch, steps_under_way
from strata_planner.question.workload import Workload
from strata_planner.search.exact.phases import Pair
from strata_planner.search.layouts.stages import Split, pair_of
from strata_planner.search.steady import Load, StageSteps, Steady, least_share, micro_batches_of, slowest_of, steady
from strata_planner.simulate import (
    Batch,
    Hop,
    Limits,
    Outcome,
    ReplicaModel,
    Request,
    StageModel,
    StageSeconds,
    simulate,
)
from tests.planner.builders import a_request

FIXED, ROW = 10.0, 0.125  # seconds of a step, and of each of its tokens


def a_stage(speed: float, begun: float = 0.0) -> StageSeconds:
    """`begun`: what any prompt adds, as one that reads nearly all experts."""
    return lambda batch: (FIXED + begun * bool(batch.chunks) + ROW * batch.tokens) / speed


def decoding(speeds: list[float], in_flight: int, prompt: int, answer: int, chunk: int) -> int:
    """Sequences of a step, at most; one prompt at a time is computed."""
    load = Workload(prompt_tokens=prompt, output_tokens=answer, concurrency=in_flight)
    request = a_request(workload=load, max_model_len=2048, chunk_tokens=min(chunk, prompt))
    return pair_of(request, Split(len(speeds), 0), len(speeds)).decode


def told(
    speeds: list[float],
    in_flight: int,
    prompt: int,
    answer: int,
    chunk: int,
    hop: Hop,
    varies: float = 0.0,
    begun: float = 0.0,
    *,
    has_experts: bool = True,
) -> Steady:
    """By the formula."""
    pair = Pair(1, decoding(speeds, in_flight, prompt, answer, chunk), chunk)
    steps = -(-prompt // chunk)
    rows = pair.decode + -(-prompt // steps)
    decode = np.array([[a_stage(speed)(Batch(pair.decode, 0, 0, 0))] for speed in speeds])
    any_chunk = np.array([[begun / speed] for speed in speeds])
    both = any_chunk + np.array([[a_stage(speed)(Batch(rows, 0, 0, 0))] for speed in speeds])
    several = len(speeds) > 1
    send = np.full_like(decode, several * hop.seconds_per_token * pair.decode)
    prompts = np.full_like(decode, several * hop.seconds_per_token * (rows - pair.decode))
    latency = np.full_like(decode, several * hop.latency_seconds)
    stages = StageSteps(decode, both - decode, send, prompts, latency, np.full_like(decode, varies), any_chunk)
    batches = micro_batches_of(in_flight, len(speeds), pair)
    one = (np.array([float(each)]) for each in (in_flight, batches, len(speeds), steps))
    in_flight_, count, under, prompt_steps = one
    load = Load(in_flight_, count, under, prompt_steps, answer, prompt, has_experts=has_experts)
    return steady(stages, load)


def closed_loop(
    speeds: list[float],
    in_flight: int,
    prompt: int,
    answer: int,
    chunk: int,
    hop: Hop,
    most: int = 8,
    begun: float = 0.0,
    least: int = 0,
) -> Outcome:
    """`most`: requests beside six for each client; `least`: tokens of prompts in a step."""
    decode = decoding(speeds, in_flight, prompt, answer, chunk)
    batch = MicroBatch(1, decode, chunk + decode, prompts_per_token=prompt / answer, least_prompt_tokens=least)
    limits = Limits(batch, 16, 10**6, 10**6)
    replica = ReplicaModel(tuple(StageModel(a_stage(speed, begun), hop) for speed in speeds), limits)
    draw = random.Random(1)
    first = [Request(0.0, prompt, draw.randint(1, answer)) for _ in range(in_flight)]
    count = 6 * in_flight + most
    rest = [Request(0.0, prompt, draw.randint(answer // 2, answer * 3 // 2)) for _ in range(count)]
    return simulate([replica], [*first, *rest], in_flight=in_flight)


def simulated(speeds: list[float], in_flight: int, prompt: int, answer: int, chunk: int, hop: Hop) -> float:
    """Requests a second of a closed loop, once all that were there at the start are gone and until the last ones come."""
    return closed_loop(speeds, in_flight, prompt, answer, chunk, hop).steady_tokens_per_second(in_flight) / answer


EVEN, UNLIKE = [1.0] * 6, [1.0, 2.0, 4.0]
LAN, WAN = Hop(0.01, 0.001), Hop(20.0, 0.01)


@pytest.mark.parametrize(
    ("speeds", "in_flight", "prompt", "answer", "chunk", "hop"),
    [
        pytest.param([1.0], 1, 64, 32, 512, LAN, id="one at a time"),
        pytest.param([1.0], 16, 64, 32, 512, LAN, id="one stage"),
        pytest.param([1.0], 16, 512, 16, 1024, LAN, id="prompts that take longer than answers"),
        pytest.param(EVEN, 1, 64, 32, 512, LAN, id="one at a time over six stages"),
        pytest.param(EVEN, 24, 256, 64, 64, LAN, id="chunks"),
        pytest.param(EVEN, 60, 512, 32, 128, LAN, id="nearly every step carries prompts"),
        pytest.param(UNLIKE, 12, 128, 64, 128, LAN, id="unlike stages"),
        pytest.param([1.0], 8, 1024, 32, 512, LAN, id="long prompts beside few streams"),
        pytest.param(UNLIKE, 6, 1024, 64, 256, LAN, id="long prompts beside two streams a step"),
        pytest.param(UNLIKE, 12, 128, 64, 64, WAN, id="far away"),
        pytest.param(EVEN, 4, 64, 32, 64, WAN, id="far away and nearly idle"),
    ],
)
def test_the_formula_tells_what_the_engine_does(
    speeds: list[float], in_flight: int, prompt: int, answer: int, chunk: int, hop: Hop
) -> None:
    formula = told(speeds, in_flight, prompt, answer, chunk, hop)
    rate = simulated(speeds, in_flight, prompt, answer, chunk, hop)
    assert float(formula.requests_per_second[0]) == pytest.approx(rate, rel=0.12)


@pytest.mark.parametrize("begun", [0.0, FIXED / 4])
@pytest.mark.parametrize(
    ("stages", "in_flight", "prompt", "answer"), [(2, 2, 192, 24), (2, 2, 192, 64), (3, 4, 192, 48), (2, 6, 64, 32)]
)
def test_prompts_that_are_dear_beside_few_streams_are_told_too(
    monkeypatch: pytest.MonkeyPatch, stages: int, in_flight: int, prompt: int, answer: int, begun: float
) -> None:
    """As on a processor, where some five tokens of a prompt take as long as a step that decodes, and few of them longer each."""
    monkeypatch.setitem(globals(), "ROW", FIXED / 4)
    load = ([1.0] * stages, in_flight, prompt, answer, 128, LAN)
    formula = told(*load, begun=begun, has_experts=False)
    rate = closed_loop(*load, begun=begun).steady_tokens_per_second(in_flight) / answer
    assert float(formula.requests_per_second[0]) == pytest.approx(rate, rel=0.15)


def test_whole_prompts_which_every_stage_waits_for_are_cut_by_the_engine() -> None:
    """Streams keep their pace: a chunk of any size goes in the parts that a smaller one does, and the formula knows."""
    load = (EVEN, 24, 256, 64, 512, LAN)
    assert float(told(*load).requests_per_second[0]) == pytest.approx(simulated(*load), rel=0.12)
    cut = (EVEN, 24, 256, 64, 64, LAN)
    assert simulated(*load) == pytest.approx(simulated(*cut), rel=0.05)


@pytest.mark.parametrize(
    ("speeds", "in_flight", "prompt", "answer", "chunk"),
    [
        pytest.param([1.0], 1, 1024, 32, 128, id="one at a time"),
        pytest.param([1.0], 4, 1024, 64, 512, id="four streams"),
        pytest.param(EVEN, 4, 1024, 64, 128, id="steps that no stream is left for"),
        pytest.param(EVEN, 6, 1024, 128, 512, id="a stream a stage"),
        pytest.param(UNLIKE, 3, 2048, 128, 128, id="unlike stages"),
    ],
)
def test_long_prompts_beside_few_streams_have_their_first_token_when_told(
    speeds: list[float], in_flight: int, prompt: int, answer: int, chunk: int
) -> None:
    formula = told(speeds, in_flight, prompt, answer, chunk, LAN)
    outcome = closed_loop(speeds, in_flight, prompt, answer, chunk, LAN, most=80)
    first = [each.ttft_seconds or 0.0 for each in outcome.requests[2 * in_flight : -in_flight]]
    assert float(formula.first_token[0]) == pytest.approx(sum(first) / len(first), rel=0.3)


@pytest.mark.parametrize(
    ("speeds", "in_flight", "prompt", "answer", "chunk"),
    [
        pytest.param([1.0], 4, 1024, 64, 1024, id="one stage"),
        pytest.param([1.0], 2, 1024, 256, 512, id="two streams"),
        pytest.param(EVEN, 12, 1024, 64, 512, id="two streams a stage"),
        pytest.param(EVEN, 48, 1024, 128, 1024, id="many streams"),
        pytest.param(UNLIKE, 6, 2048, 128, 1024, id="unlike stages"),
    ],
)
def test_steps_that_read_experts_for_any_prompt_carry_enough_of_it_and_the_formula_knows(
    speeds: list[float], in_flight: int, prompt: int, answer: int, chunk: int
) -> None:
    begun, load = 16 * FIXED, (speeds, in_flight, prompt, answer, chunk, LAN)
    whole = begun + ROW * -(-prompt // -(-prompt // chunk))
    none = np.zeros((1, 1))
    share = least_share(StageSteps(none, none + whole, none, none, none, none, none + begun), has_experts=True)
    least = math.ceil(float(share[0]) * chunk)
    assert (begun + ROW * least) / least == pytest.approx(2 * whole / chunk, rel=0.02)  # each twice as dear
    formula = told(*load, begun=begun)
    outcome = closed_loop(*load, most=40, begun=begun, least=least)
    rate = outcome.steady_tokens_per_second(in_flight) / answer
    assert float(formula.requests_per_second[0]) == pytest.approx(rate, rel=0.2)
    slower = closed_loop(*load, most=40, begun=begun).steady_tokens_per_second(in_flight) / answer
    assert rate > 1.1 * slower  # than in the small parts that keep streams' pace


@pytest.mark.parametrize("count", [1, 2, 4])
def test_no_more_steps_are_under_way_than_the_plan_says(count: int) -> None:
    """Prompts alone fill four stages: with fewer steps under way, stages wait, and no prompt begins before a step is back."""
    four = np.full((4, 1), 10.0)
    none = np.zeros_like(four)
    stages = StageSteps(four, four, none, none, none, none, none)
    pair = Pair(1, 8, 2048, count)
    one = (np.array([float(each)]) for each in (32, micro_batches_of(32, 4, pair), steps_under_way(count, 4), 1))
    in_flight, cut, under, steps = one
    found = steady(stages, Load(in_flight, cut, under, steps, 1, 64))
    assert float(found.requests_per_second[0]) <= count / (4 * 20.0) * (1 + 1e-9)


def test_a_lone_request_takes_its_steps_one_after_the_other() -> None:
    one = told([1.0, 2.0], 1, 64, 33, 64, Hop())
    decode, whole = (FIXED + ROW) * 1.5, (FIXED + 65 * ROW) * 1.5
    assert float(one.next_token[0]) == pytest.approx(decode)
    assert float(one.first_token[0]) == pytest.approx(whole, rel=0.3)  # half a step until the next one begins


pipelines = st.tuples(
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=5),
    st.integers(1, 60),
    st.integers(1, 600),
    st.integers(1, 80),
    st.sampled_from([32, 128, 2048]),
)


@given(pipelines, st.floats(1.1, 4.0), st.integers(0, 4), st.sampled_from([0.0, FIXED]))
def test_quicker_stages_and_links_are_never_worse(
    pipeline: tuple[list[float], int, int, int, int], factor: float, place: int, begun: float
) -> None:
    """Hardly: the fixed point may fall elsewhere, in two of thirty thousand pipelines by four hundredths. With much more than `FIXED` it does so oftener."""
    speeds, *load = pipeline
    quicker = [speed * factor if at == place else speed for at, speed in enumerate(speeds)]
    slow = told(speeds, *load, hop=Hop(0.5, 0.01), begun=begun)
    fast = told(quicker, *load, hop=Hop(0.25, 0.005), begun=begun)
    worse = 0.03 if begun else 0.01
    assert float(fast.requests_per_second[0]) >= float(slow.requests_per_second[0]) * (1 - worse)


@given(pipelines)
def test_requests_in_flight_are_rate_times_seconds(pipeline: tuple[list[float], int, int, int, int]) -> None:
    """Little's law; and no stage does more than one thing at a time."""
    speeds, in_flight, prompt, answer, chunk = pipeline
    found = told(speeds, in_flight, prompt, answer, chunk, Hop(0.5, 0.01))
    rate, first, each = (float(values[0]) for values in found)
    assert rate * (first + (answer - 1) * each) == pytest.approx(in_flight, rel=1e-6)
    least = max(ROW * (prompt + answer - 1) / speed for speed in speeds)
    assert rate * least <= 1 + 1e-9


def round_trip(means: list[float], steps: int, spread: float, rounds: int = 1500) -> float:
    """Seconds from one step's end to the next one's, where so many go round and none overtakes another; each varies."""
    draw, free, back = random.Random(2), [0.0] * len(means), [0.0] * steps
    for turn in range(rounds * steps):
        now = back[turn % steps]
        for place, mean in enumerate(means):
            free[place] = now = max(now, free[place]) + mean * max(0.0, draw.gauss(1.0, spread))
        back[turn % steps] = now
    return max(back) / (rounds * steps)


@pytest.mark.parametrize(
    ("means", "steps"),
    [([1.0], 1), ([1.0, 1.0], 2), ([1.0, 1.0], 3), ([1.0, 0.8], 2), ([1.0, 0.95], 2), ([1.0] * 3, 3), ([1.0] * 4, 6)],
)
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.2])
def test_stages_wait_for_each_other_where_steps_vary(means: list[float], steps: int, spread: float) -> None:
    seconds = np.array([[each] for each in means])
    gini = np.full_like(seconds, spread / np.sqrt(np.pi))
    formula = slowest_of(seconds, gini, np.array([float(steps)]))
    assert float(formula[0]) == pytest.approx(round_trip(means, steps, spread), rel=0.05)


def test_what_varies_is_told_slower_only_where_stages_wait() -> None:
    load = (EVEN, 6, 64, 64, 64, LAN)
    calm, varied = told(*load), told(*load, varies=0.05)
    assert varied.requests_per_second[0] < 0.97 * calm.requests_per_second[0]
    alone = ([1.0], 6, 64, 64, 64, LAN)
    assert told(*alone, varies=0.05) == told(*alone)


def test_prompts_that_differ_wait_longer_for_each_other_and_a_lone_one_for_none() -> None:
    stages = StageSteps(*(np.array([[each]]) for each in (10.0, 20.0, 0.0, 0.0, 0.0, 0.0, 0.0)))

    def first(in_flight: int, variation: float) -> float:
        one = (np.array([float(each)]) for each in (in_flight, 1, 1, 8))
        flying, cut, under, steps = one
        return float(steady(stages, Load(flying, cut, under, steps, 128, 1024, variation)).first_token[0])

    assert first(1, 0.0) == first(1, 2.0)
    assert first(8, 0.0) < first(8, 1.0) < first(8, 2.0)
