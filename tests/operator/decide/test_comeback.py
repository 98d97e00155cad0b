"""Restart or takeover: the rule, and what its seconds are made of."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_operator.decide.comeback import (
    GROW_SECONDS,
    SWITCH_SECONDS,
    Pace,
    served_share,
    still_to_go,
    weigh,
    weights_of,
)
from strata_planner.contract.control import Took
from strata_planner.contract.rates import PORT_BYTES_PER_SECOND, READ_BYTES_PER_SECOND
from strata_planner.replan.repair import RepairNote
from tests.operator.fakes import a_plan, replicas_of

seconds = st.floats(0, 1000)
shares = st.floats(0, 1)
PLAN = a_plan("a", "b", "c")
SIZE = weights_of(PLAN)["b"]


@pytest.mark.parametrize(
    ("restart", "takeover", "kept", "meanwhile", "chosen"),
    [
        pytest.param(60, 4, 0.5, 0, "takeover", id="40 GB are read, beside shadows"),
        pytest.param(60, 4, 0.85, 0, "takeover", id="the same, one of eight devices"),
        pytest.param(0.7, 0.4, 0.66, 0, "restart", id="strata-tiny under strata up"),
        pytest.param(4, 0.6, 0.66, 0, "restart", id="strata-tiny on Kubernetes"),
        pytest.param(60, 55, 0.9, 0, "restart", id="nearly as long"),
        pytest.param(60, 4, 0.1, 0, "restart", id="next to nothing is left"),
        pytest.param(60, 4, 0.75, 0.5, "takeover", id="one of two replicas"),
        pytest.param(3600, 0.5, 0.5, 0.5, "restart", id="a repair that leaves the replica out"),
        pytest.param(60, 4, 1.2, 0, "takeover", id="a repair that is better"),
    ],
)
def test_what_is_chosen(restart: float, takeover: float, kept: float, meanwhile: float, chosen: str) -> None:
    assert weigh(restart, takeover, kept, meanwhile).chosen == chosen


def takes_over(restart: float, takeover: float, kept: float, meanwhile: float) -> bool:
    return weigh(restart, takeover, kept, meanwhile).chosen == "takeover"


@given(restart=seconds, takeover=seconds, kept=shares, meanwhile=shares, more=seconds)
def test_more_reasons_for_a_takeover_never_speak_against_it(
    restart: float, takeover: float, kept: float, meanwhile: float, more: float
) -> None:
    """A longer restart, a repair that gives more, or is there sooner."""
    if takes_over(restart, takeover, kept, meanwhile):
        assert takes_over(restart + more, takeover, kept, meanwhile)
        assert takes_over(restart, takeover, kept + (1 - kept) * more / 1000, meanwhile)
        assert takes_over(restart, max(0, takeover - more), kept, meanwhile)


@given(restart=seconds, takeover=seconds, kept=shares, meanwhile=shares)
def test_a_takeover_is_sooner_and_gives_more_than_what_serves_meanwhile(
    restart: float, takeover: float, kept: float, meanwhile: float
) -> None:
    if takes_over(restart, takeover, kept, meanwhile):
        assert takeover < restart
        assert kept > meanwhile


@given(expected=seconds, back=seconds)
def test_who_waits_by_the_rest_loses_no_more_than_twice_the_best(expected: float, back: float) -> None:
    """Once it is late its rest only grows: whatever is quicker is chosen in the end."""
    assert still_to_go(expected, 0) == expected
    late = 1.5 * expected + 1 + back
    assert still_to_go(expected, late + 0.001) >= late
    assert still_to_go(expected, min(back, expected)) == pytest.approx(expected - min(back, expected))


def test_before_anything_was_seen_both_are_told_from_bytes() -> None:
    pace = Pace({}, start_seconds=3, again_seconds=1)
    assert pace.restart_seconds(PLAN, "b") == pytest.approx(4 + SIZE / READ_BYTES_PER_SECOND + SWITCH_SECONDS)
    note = RepairNote("neighbours", 1, 0, 3 << 30, 0.5, 3.0, 1 << 30, 2 << 30, 3 << 30, 0.25)
    read, copied = (2 << 30) / READ_BYTES_PER_SECOND, (3 << 30) / PORT_BYTES_PER_SECOND
    assert pace.takeover_seconds(PLAN, note) == pytest.approx(read + copied + 0.25 + SWITCH_SECONDS)


def test_what_was_seen_is_expected_again() -> None:
    sizes = weights_of(PLAN)
    pace = Pace({"a": Took(2, 10, 1), "gone": Took(1, 1, 1)}, start_seconds=9)
    assert pace.restart_seconds(PLAN, "a") == pytest.approx(12 + SWITCH_SECONDS)
    assert pace.bytes_per_second(PLAN) == sizes["a"] / 10
    assert pace.restart_seconds(PLAN, "b") == pytest.approx(2 + 10 * sizes["b"] / sizes["a"] + SWITCH_SECONDS)
    note = RepairNote("neighbours", 1, 0, 0, 0.5, 3.0, read_bytes=2 * sizes["a"])
    assert pace.takeover_seconds(PLAN, note) == pytest.approx(20 + SWITCH_SECONDS)


def test_whole_replicas_serve_meanwhile() -> None:
    plan = replicas_of(a_plan("a", "b"), a_plan("c", "d"))
    assert served_share(plan, frozenset("b")) == pytest.approx(0.5)
    assert served_share(plan, frozenset("bc")) == 0
    silent = msgspec.structs.replace(plan, replicas=())
    assert served_share(silent, frozenset("b")) == 0


def test_how_long_a_repair_serves_is_what_the_restart_takes_and_a_search() -> None:
    """Half of the plan for so long is half of that without it."""
    restart = 2 * (GROW_SECONDS / 2 + 2.5 + 1) - 1
    assert not takes_over(restart - 2, 1, 0.5, 0)
    assert takes_over(restart + 2, 1, 0.5, 0)
