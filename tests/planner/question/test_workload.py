"""What requests in flight hold: long answers are met more often than they come."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.errors import WorkloadError
from strata_planner.question.workload import Workload
from tests.planner.builders import a_request


def test_answers_in_flight_are_those_that_chance_meets() -> None:
    """Against a draw of moments: an answer is met in proportion to its length, and halfway through."""
    draw = random.Random(3)
    lengths = [draw.choice((10, 20, 400)) for _ in range(20_000)]
    mean, deviation = statistics.mean(lengths), statistics.pstdev(lengths)
    met = draw.choices(lengths, weights=lengths, k=20_000)
    load = Workload(100, round(mean), 8, output_deviation=deviation)
    assert load.held_tokens == pytest.approx(100 + statistics.mean(met), rel=0.02)
    assert load.seen_tokens == pytest.approx(100 + statistics.mean(draw.uniform(0, each) for each in met), rel=0.02)


def test_equal_answers_hold_what_they_are() -> None:
    load = Workload(100, 28, 8)
    assert (load.held_tokens, load.seen_tokens) == (load.sequence_tokens, 114)


def test_pages_are_planned_for_what_is_held() -> None:
    equal, unlike = (
        a_request(workload=Workload(64, 64, 8, output_deviation=each), max_model_len=1024) for each in (0.0, 128.0)
    )
    assert unlike.kv_pages == 8 * (64 + 64 + 256) // 16 > equal.kv_pages
    with pytest.raises(WorkloadError, match="output_deviation -1"):
        Workload(1, 1, 1, output_deviation=-1)


@given(
    deviation=st.floats(0, 1e4), more=st.floats(0, 1e4), concurrency=st.integers(1, 500), prompt=st.integers(1, 5000)
)
def test_more_spread_of_prompts_is_never_told_less_kv(
    deviation: float, more: float, concurrency: int, prompt: int
) -> None:
    less, greater = (Workload(prompt, 28, concurrency, prompt_deviation=each) for each in (deviation, deviation + more))
    equal = Workload(prompt, 28, concurrency)
    assert equal.held_tokens <= less.held_tokens <= greater.held_tokens
    assert equal.seen_tokens == greater.seen_tokens


@pytest.mark.parametrize("concurrency", [1, 16, 100])
def test_prompts_in_flight_seldom_hold_more_than_they_are_told(concurrency: int) -> None:
    """Against a draw: one standard deviation of the sum is passed in about one case of six."""
    draw, load = random.Random(4), Workload(1000, 1, concurrency, prompt_deviation=500)
    sums = [sum(draw.gauss(1000, 500) for _ in range(concurrency)) for _ in range(2000)]
    over = statistics.mean(each > concurrency * (load.held_tokens - 1) for each in sums)
    assert over == pytest.approx(0.16, abs=0.03)
