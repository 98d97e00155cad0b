"""Slots of a local deployment that are away: when they are planned with again, and whether they are waited for."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from strata_operator.local.losses import STEADY_SECONDS, Down, Losses
from strata_planner.contract.control import Took
from strata_planner.replan.repair import Repair, RepairNote
from tests.operator.fakes import FakeSlot, a_plan


@given(answers=st.lists(st.tuples(st.floats(0.1, STEADY_SECONDS / 2), st.booleans()), max_size=20))
def test_a_slot_is_planned_with_again_once_it_has_answered_for_long_without_a_break(
    answers: list[tuple[float, bool]],
) -> None:
    losses, now = Losses().taken_over(frozenset({"b"})), 0.0
    statuses = {"b": FakeSlot("b").status()}
    since: float | None = None
    for seconds, is_there in answers:
        now += seconds
        losses = losses.seen(statuses if is_there else {}, now)
        since = (now if since is None else since) if is_there else None
        assert losses.back(now) == (
            frozenset({"b"}) if since is not None and now - since >= STEADY_SECONDS else frozenset()
        )
        assert (losses.next_look(now) is None) == (since is None)
    assert not losses.without(frozenset({"b"})).away


def test_one_that_refuses_is_tried_again_later_each_time() -> None:
    losses, statuses = Losses(), {"b": FakeSlot("b").status()}
    for times in (2, 4, 8):
        losses = losses.taken_over(frozenset({"b"})).with_refusal("b").seen(statuses, 5.0)
        assert losses.next_look(5.0) == times * STEADY_SECONDS
        assert not losses.back(5.0 + (times - 0.1) * STEADY_SECONDS)
        assert losses.back(5.0 + times * STEADY_SECONDS) == {"b"}


def a_repair(read_bytes: int, kept_share: float) -> Repair:
    note = RepairNote("neighbours", 2, 0, read_bytes, kept_share, 5.0, read_bytes=read_bytes)
    return cast("Repair", SimpleNamespace(note=note))


SLOW, QUICK = Took(1.0, 120.0, 2), Took(0.3, 0.5, 2)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "it is soon back": ({"took": QUICK}, "restart"),
    "it loads for minutes, and the others have memory to read less of": ({"took": SLOW}, "takeover"),
    "it loads for minutes, and what is left gives little": ({"took": SLOW, "kept": 0.05}, "restart"),
    "it is late": ({"took": QUICK, "elapsed": 60.0}, "takeover"),
    "its next process ended before it served": ({"took": QUICK, "failed": 1}, "takeover"),
    "the same, and what is left gives little": ({"took": QUICK, "failed": 1, "kept": 0.4}, "restart"),
    "the next one too": ({"took": QUICK, "failed": 2, "kept": 0.4}, "takeover"),
    "it is on its way": ({"took": SLOW, "elapsed": 119.0}, "restart"),
}


@pytest.mark.parametrize(("given_", "chosen"), CASES.values(), ids=CASES)
def test_whether_it_is_waited_for(given_: dict[str, Any], chosen: str) -> None:
    plan = a_plan("a", "b", "c")
    losses = Losses(took={"b": given_["took"]})
    down = Down(given_.get("elapsed", 0.0), given_.get("failed", 0))
    choice = losses.weighed(plan, a_repair(0, given_.get("kept", 0.8)), {"b": down})
    assert choice.chosen == chosen


def test_what_a_process_took_is_known_once_it_serves_and_outlasts_it() -> None:
    slot = FakeSlot("a")
    slot.took = Took(0.4, 0.9, 2)
    status = slot.status()
    assert not Losses().seen({"a": status}, 0.0).took
    served = Losses().seen({"a": structs.replace(status, committed_epoch=1)}, 0.0)
    assert served.seen({}, 1.0).took == {"a": slot.took}
