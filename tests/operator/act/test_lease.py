"""The lease: who may take it when, by whose clock, and that only one of two operators ever writes."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_operator.act.lease import (
    LASTS_SECONDS,
    RENEW_DEADLINE_SECONDS,
    Leadership,
    LeaseName,
    NotLeadingError,
    Sighting,
    next_lease,
    released,
    sighted,
)
from strata_operator.errors import NotReadyError
from strata_operator.observe.kube import CONFIG_MAPS, THREADS
from tests.laws import share
from tests.operator.fake_api import FakeApi, serving
from tests.operator.observe.test_kube import CONFIG_MAP, kube_of

NAME = LeaseName("ns", "strata")


def taken_by(me: str) -> dict[str, Any]:
    lease = next_lease(None, None, NAME, me, 0.0)
    assert lease is not None
    return lease


@pytest.mark.parametrize(
    ("lease", "me", "seen_for", "holder"),
    [
        pytest.param(None, "a", 0.0, "a", id="nobody-has-it"),
        pytest.param(taken_by("a"), "a", 3.0, "a", id="renewed"),
        pytest.param(taken_by("a"), "b", 14.0, None, id="held-by-another"),
        pytest.param(taken_by("a"), "b", LASTS_SECONDS, "b", id="run-out"),
        pytest.param(released(taken_by("a")), "b", 1.0, "b", id="given-back"),
        pytest.param({"metadata": {}}, "b", 0.0, "b", id="made-empty-by-hand"),
    ],
)
def test_who_holds_it_next(lease: dict[str, Any] | None, me: str, seen_for: float, holder: str | None) -> None:
    written = next_lease(lease, sighted(None, lease, 100.0), NAME, me, 100.0 + seen_for)
    assert (written["spec"]["holderIdentity"] if written else None) == holder


@pytest.mark.parametrize("renewed_at", ["1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z", "rubbish"])
def test_what_another_clock_wrote_decides_nothing(renewed_at: str) -> None:
    """client-go's rule: an unchanged lease runs out after its duration on the observer's clock, whatever time it names."""
    lease = taken_by("a")
    lease["spec"]["renewTime"] = renewed_at
    seen = sighted(None, lease, 50.0)
    assert next_lease(lease, seen, NAME, "b", 50.0 + LASTS_SECONDS - 0.1) is None
    assert next_lease(lease, seen, NAME, "b", 50.0 + LASTS_SECONDS) is not None


def test_every_renewal_starts_the_observers_clock_anew() -> None:
    first, second = taken_by("a"), taken_by("a")
    second["spec"]["renewTime"] = "another"
    seen = sighted(None, first, 0.0)
    assert sighted(seen, first, 9.0) == seen
    assert sighted(seen, second, 9.0) == Sighting(second["spec"], 9.0)


def test_taking_over_counts_and_renewing_keeps_the_time_of_taking() -> None:
    lease = taken_by("a")
    renewed = next_lease(lease, sighted(None, lease, 0.0), NAME, "a", 3.0)
    taken = next_lease(lease, sighted(None, lease, 0.0), NAME, "b", LASTS_SECONDS)
    assert renewed is not None
    assert taken is not None
    assert renewed["spec"]["acquireTime"] == lease["spec"]["acquireTime"]
    assert (renewed["spec"]["leaseTransitions"], taken["spec"]["leaseTransitions"]) == (0, 1)


class InMemory:
    """A Lease kept as the API server keeps it: resource versions, conflicts, and now and then no answer."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.away = False

    async def get(self, *_: Any) -> dict[str, Any] | None:
        if self.away:
            raise NotReadyError("no answer")
        return self.lease and {**self.lease, "metadata": dict(self.lease["metadata"])}

    async def create(self, _: Any, lease: dict[str, Any]) -> dict[str, Any]:
        if self.lease is not None:
            raise NotReadyError("exists")
        return self._keep(lease)

    async def replace(self, _: Any, lease: dict[str, Any]) -> dict[str, Any]:
        if self.lease is None or lease["metadata"].get("resourceVersion") != str(self.version):
            raise NotReadyError("modified")
        return self._keep(lease)

    def _keep(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.version)}}
        return self.lease


@settings(max_examples=share(60), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1]), st.floats(0, 9), st.booleans()), min_size=5, max_size=40),
    st.floats(-1e6, 1e6),
)
def test_two_operators_never_lead_at_once(events: list[tuple[int, float, bool]], skew: float) -> None:
    """Whoever tries when, however far their clocks are apart, with an API server that is away at will."""
    now = 0.0
    store = InMemory()
    both = [
        Leadership(store, NAME, f"op-{index}", lambda: None, lambda index=index: now + index * skew)  # type: ignore[arg-type, misc]
        for index in range(2)
    ]

    async def play() -> None:
        nonlocal now
        for who, later, away in events:
            now += later
            store.away = away
            await both[who].renew()
            assert not (both[0].leading and both[1].leading)

    asyncio.run(play())


async def test_the_fence_closes_before_another_may_take_the_lease() -> None:
    now = 0.0
    leadership = Leadership(InMemory(), NAME, "a", lambda: None, lambda: now)  # type: ignore[arg-type]
    with pytest.raises(NotLeadingError):
        leadership.seconds_left()
    await leadership.renew()
    now = RENEW_DEADLINE_SECONDS - 0.5
    assert leadership.seconds_left() == LASTS_SECONDS - now
    now = RENEW_DEADLINE_SECONDS
    assert not leadership.leading
    with pytest.raises(NotLeadingError, match="a holds the lease strata no longer"):
        leadership.seconds_left()


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as fake:
        yield fake


async def test_behind_a_closed_fence_everything_is_read_and_nothing_written(api: FakeApi) -> None:
    leadership = Leadership(kube_of(api.url), NAME, "a", lambda: None)
    kube = kube_of(api.url).behind(leadership)
    assert await kube.list(CONFIG_MAPS) == []
    for write in (kube.apply(CONFIG_MAP), kube.create(CONFIG_MAPS, CONFIG_MAP), kube.delete(CONFIG_MAPS, "ns", "x")):
        with pytest.raises(NotLeadingError):
            await write
    assert {request.method for request in api.requests} == {"GET"}
    await leadership.renew()
    await kube.apply(CONFIG_MAP)
    assert api.wrote("PATCH", "/configmaps/x")


async def test_writes_that_hang_do_not_keep_the_lease_from_being_renewed(api: FakeApi) -> None:
    hang = threading.Event()
    api.refuse = lambda request: (504, "timed out") if request.method == "PATCH" and hang.wait(30) else None
    leadership = Leadership(kube_of(api.url), NAME, "a", lambda: None)
    await leadership.renew()
    kube = kube_of(api.url).behind(leadership)
    writes = [asyncio.create_task(kube.apply(CONFIG_MAP)) for _ in range(2 * THREADS)]
    while len(api.wrote("PATCH", "/configmaps/x")) < THREADS:  # noqa: ASYNC110  the other side is a thread
        await asyncio.sleep(0.01)
    await asyncio.wait_for(leadership.renew(), 20)
    assert leadership.leading
    hang.set()
    assert all(isinstance(each, NotReadyError) for each in await asyncio.gather(*writes, return_exceptions=True))


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
