"""The lease: who may take it when, and that only one of two operators leads."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from strata_operator.act.lease import LASTS, Leadership, LeaseName, next_lease, released
from tests.operator.fake_api import FakeApi, serving
from tests.operator.test_kube import kube_of

NAME = LeaseName("ns", "strata")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def taken_by(me: str, when: datetime = NOW) -> dict[str, Any]:
    lease = next_lease(None, NAME, me, when)
    assert lease is not None
    return lease


@pytest.mark.parametrize(
    ("lease", "me", "after", "holder"),
    [
        pytest.param(None, "a", timedelta(), "a", id="nobody-has-it"),
        pytest.param(taken_by("a"), "a", timedelta(seconds=3), "a", id="renewed"),
        pytest.param(taken_by("a"), "b", timedelta(seconds=14), None, id="held-by-another"),
        pytest.param(taken_by("a"), "b", LASTS, "b", id="run-out"),
        pytest.param(released(taken_by("a")), "b", timedelta(seconds=1), "b", id="given-back"),
    ],
)
def test_who_holds_it_next(lease: dict[str, Any] | None, me: str, after: timedelta, holder: str | None) -> None:
    written = next_lease(lease, NAME, me, NOW + after)
    assert (written["spec"]["holderIdentity"] if written else None) == holder


def test_taking_over_counts_and_renewing_keeps_the_time_of_taking() -> None:
    renewed = next_lease(taken_by("a"), NAME, "a", NOW + timedelta(seconds=3))
    taken = next_lease(taken_by("a"), NAME, "b", NOW + LASTS)
    assert renewed is not None
    assert taken is not None
    assert renewed["spec"]["acquireTime"] == taken_by("a")["spec"]["acquireTime"]
    assert (renewed["spec"]["leaseTransitions"], taken["spec"]["leaseTransitions"]) == (0, 1)


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    with serving(fake) as url:
        fake.url = url
        yield fake


async def test_one_of_two_leads_and_the_other_follows_when_it_ends(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata_operator.act.lease.RENEWED_EVERY_SECONDS", 0.05)
    turned = asyncio.Event()
    one = Leadership(kube_of(api.url), NAME, "one", turned.set)
    other = Leadership(kube_of(api.url), NAME, "other", turned.set)
    first = asyncio.create_task(one.keep())
    await turned.wait()
    turned.clear()
    second = asyncio.create_task(other.keep())
    assert (one.leading, other.leading) == (True, False)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await turned.wait()
    assert (one.leading, other.leading) == (False, True)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
