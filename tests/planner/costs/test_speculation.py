"""What rounds of speculation gain: the formula beside rounds that are played."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.costs.speculation import Guessing, RoundSeconds, best_tokens, speed_up

acceptances = st.floats(0, 1)
counts = st.integers(1, 15)
seconds = st.floats(1e-4, 1)


def costs(step: float, draft: float, row: float, room: int = 15) -> RoundSeconds:
    return RoundSeconds(step, draft, lambda drafts: step + drafts * row, room)


@given(acceptances, seconds, seconds, seconds, st.floats(0, 1))
def test_no_drafts_gain_nothing(acceptance: float, step: float, draft: float, row: float, guessed: float) -> None:
    assert speed_up(Guessing(acceptance, guessed), 0, costs(step, draft, row)) == pytest.approx(1)


@given(counts, seconds, seconds, seconds)
def test_drafts_that_are_never_right_cost_what_they_take(count: int, step: float, draft: float, row: float) -> None:
    told = 1 / (1 + count * (draft + row) / step)
    assert speed_up(Guessing(0), count, costs(step, draft, row)) == pytest.approx(told)


@given(acceptances, acceptances, counts, seconds, seconds, st.floats(0.01, 1))
def test_the_more_are_right_the_more_is_gained(
    one: float, other: float, count: int, step: float, draft: float, guessed: float
) -> None:
    low, high = sorted((one, other))
    priced = costs(step, draft, draft / 2)
    assert speed_up(Guessing(low, guessed), count, priced) <= speed_up(Guessing(high, guessed), count, priced) + 1e-9


@given(acceptances, counts, seconds, st.integers(0, 15))
def test_no_more_are_drafted_than_there_is_room_for(acceptance: float, count: int, step: float, room: int) -> None:
    guessing = Guessing(acceptance)
    least = min(count, room)
    assert speed_up(guessing, count, costs(step, step / 4, 0, room)) == speed_up(
        guessing, least, costs(step, step / 4, 0)
    )


@given(st.floats(0, 0.99), counts, st.floats(0.01, 1))
def test_it_is_the_theorem_where_a_verification_takes_a_step(acceptance: float, count: int, share: float) -> None:
    told = (1 - acceptance ** (count + 1)) / ((1 - acceptance) * (count * share + 1))
    assert speed_up(Guessing(acceptance), count, costs(1, share, 0)) == pytest.approx(told)


@given(acceptances, seconds, seconds, seconds, st.integers(0, 15))
def test_the_best_number_is_the_best_of_all(
    acceptance: float, step: float, draft: float, row: float, room: int
) -> None:
    guessing, priced = Guessing(acceptance), costs(step, draft, row, room)
    count, gained = best_tokens(guessing, priced)
    assert gained == pytest.approx(max(speed_up(guessing, each, priced) for each in range(16)))
    assert count <= room


@pytest.mark.parametrize(
    ("acceptance", "count", "guessed"), [(0.6, 4, 1.0), (0.9, 7, 1.0), (0.8, 3, 0.4), (0.3, 15, 0.7)]
)
def test_it_is_what_rounds_make_that_are_played(acceptance: float, count: int, guessed: float) -> None:
    draw, priced = random.Random(7), costs(1.0, 0.3, 0.1)
    tokens, taken = 0, 0.0
    for _ in range(40_000):
        if draw.random() >= guessed:
            tokens, taken = tokens + 1, taken + priced.step
            continue
        right = 0
        while right < count and draw.random() < acceptance:
            right += 1
        tokens, taken = tokens + right + 1, taken + count * priced.draft + priced.verification(count)
    played = tokens / taken * priced.step
    assert speed_up(Guessing(acceptance, guessed), count, priced) == pytest.approx(played, rel=0.02)
