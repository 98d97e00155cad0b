"""The demo's client: how it counts tokens a second while all clients are at it."""

import pytest

from strata_operator.local.client import Answer, steady_rate


def test_tokens_are_counted_while_all_clients_are_at_it() -> None:
    """Two clients of 10 tokens a second each; the second comes later and stays longer, alone and faster for it."""
    first = [Answer(0, 1, 10), Answer(1, 2, 10), Answer(2, 3, 10)]
    second = [Answer(0.5, 1.5, 10), Answer(1.5, 2.5, 10), Answer(2.5, 4.5, 60)]
    assert steady_rate([first, second]) == pytest.approx((15 + 10 + 15) / 1.5)


def test_of_one_answer_each_all_time_counts() -> None:
    assert steady_rate([[Answer(0, 2, 10)], [Answer(1, 5, 40)]]) == pytest.approx(10)
