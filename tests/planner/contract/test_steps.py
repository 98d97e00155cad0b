"""The pace of streams: what prompts may add to a step, learned from steps alone."""

import math

from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.rows import padded_rows
from strata_planner.contract.steps import Pace

SECONDS = st.floats(1e-4, 1.0)


@given(SECONDS, SECONDS, st.integers(2, 50), st.integers(2, 2000), st.integers(1, 64))
def test_streams_wait_at_most_as_long_again_for_each_who_waits(
    decode: float, token: float, steps: int, chunk: int, waiting: int
) -> None:
    """Where steps take what they take evenly, and prompts get most of what streams bear."""
    pace = Pace()
    for _ in range(steps):  # the first of each number of rows is not believed: kernels are made in it
        pace.learn(0, chunk, token * chunk)
        pace.learn(4, 0, decode)
        pace.learn(4, chunk, decode + token * chunk)
    allowed = pace.tokens(4, waiting)
    assert (1 + waiting / 2) * decode <= decode + token * allowed <= (1 + waiting) * decode * 1.01


@given(st.integers(8, 64), st.floats(1e-4, 1e-2), st.floats(1e-5, 1e-2), st.floats(1e-4, 1e-2))
def test_streams_that_join_while_every_step_carries_prompts_are_not_taken_for_prompts(
    streams: int, fixed: float, row: float, token: float
) -> None:
    """One stream alone, then many at once and a prompt that never ends: its chunks come to what streams bear, not to nothing."""
    pace = Pace()

    def step(rows: int, prompt: int) -> None:
        pace.learn(rows, prompt, fixed + row * padded_rows(rows) * (rows > 0) + token * prompt)

    for _ in range(20):
        step(0, 64)
        step(1, 0)
    for _ in range(400):
        step(streams, max(16, min(512, int(pace.tokens(streams, 1)))))
    fair = 0.8 * (fixed + row * padded_rows(streams)) / token
    assert max(16, pace.tokens(streams, 1)) > 0.25 * min(fair, 512)


def test_nothing_is_bounded_before_anything_was_seen() -> None:
    pace = Pace()
    assert pace.tokens(2, 1) == math.inf
    for _ in range(2):
        pace.learn(0, 100, 1.0)
    assert pace.tokens(2, 1) == math.inf, "what streams take alone is not known"
    for _ in range(2):
        pace.learn(2, 0, 0.1)
    assert pace.tokens(2, 1) < 10


STRANGE = st.sampled_from([0.0, 1e-9, 1.0, -1.0, math.inf, math.nan])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), STRANGE).filter(lambda said: said[0] + said[1])))
def test_whatever_a_stage_says_some_tokens_go_on(said: list[tuple[int, int, float]]) -> None:
    pace = Pace()
    for rows, prompt, seconds in said:
        pace.learn(rows, prompt, seconds)
    assert pace.tokens(2, 1) > 0
