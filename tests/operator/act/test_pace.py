"""How fast looks follow each other: at once after a change, and no faster than ever where they go on and on."""

import pytest

from strata_operator.act.pace import A_SECOND, AT_ONCE, LONGEST_SECONDS, SHORTEST_SECONDS, Pace


@pytest.mark.parametrize(
    ("busy", "pause"), [(0.0, SHORTEST_SECONDS), (0.01, 0.03), (0.02, 0.06), (5.0, LONGEST_SECONDS)]
)
def test_a_look_is_followed_by_the_next_as_soon_as_it_is_short(busy: float, pause: float) -> None:
    assert Pace().pause(100.0, busy) == pytest.approx(pause)


def test_looks_without_end_are_slow_and_quick_again_after_a_rest() -> None:
    pace, now, quick = Pace(), 0.0, 0
    for _ in range(1000):
        pause = pace.pause(now, 0.0)
        now += pause
        quick += pause < LONGEST_SECONDS
    assert quick <= AT_ONCE + A_SECOND * now
    assert now >= 60
    assert pace.pause(now + 60, 0.0) == SHORTEST_SECONDS
