"""Whether anybody is there where a process has fallen silent: against real sockets of this machine, one of which drops what comes."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from strata_operator.act.control_client import Control, Endpoint, Links, knock
from strata_operator.decide.view import Door
from strata_planner.contract.control import Status
from tests.operator.fakes import FakeSlot

HOST = "127.0.0.1"


def refusing() -> int:
    """A port that nobody has."""
    with socket.create_server((HOST, 0)) as gone:
        return int(gone.getsockname()[1])


@asynccontextmanager
async def silent() -> AsyncIterator[int]:
    """A port at which the kernel answers nobody any more, as behind a cut: more wait there than it takes."""
    loop, waiting = asyncio.get_running_loop(), []
    with socket.create_server((HOST, 0), backlog=0) as server:
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            waiting.append((client, asyncio.ensure_future(loop.sock_connect(client, server.getsockname()))))
        await asyncio.wait([coming for _, coming in waiting], return_when=asyncio.FIRST_COMPLETED)
        try:
            yield int(server.getsockname()[1])
        finally:
            for client, coming in waiting:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
                client.close()


async def test_who_takes_or_refuses_a_connection_is_there() -> None:
    with socket.create_server((HOST, 0)) as there:
        assert await knock(Endpoint(HOST, there.getsockname()[1], "")) == "taken"
    assert await knock(Endpoint(HOST, refusing(), "")) == "refused"


async def test_of_a_kubelet_only_itself_counts() -> None:
    """The kernel of its node tells nothing of pods that are gone."""
    async with silent() as port:
        assert not await knock(Endpoint(HOST, port, ""))
        assert not await knock(Endpoint(HOST, port, "", (HOST, refusing())))
        with socket.create_server((HOST, 0)) as kubelet:
            assert await knock(Endpoint(HOST, port, "", (HOST, kubelet.getsockname()[1]))) == "kubelet"


class Slot:
    """A process of which a watch tells `told`, and then nothing; `answers`: to knocks."""

    def __init__(self, *told: Status | None) -> None:
        self.told, self.answers, self.knocks = told, True, 0
        self.breaks: Callable[[], None] = lambda: None
        self.heard, self.knocked = asyncio.Event(), asyncio.Event()

    async def watch(self, _: Endpoint, broken: Callable[[], None]) -> AsyncGenerator[Status | None]:
        self.breaks = broken
        for status in self.told:
            yield status
        self.heard.set()
        await asyncio.Event().wait()

    async def knock(self, _: Endpoint) -> Door:
        self.knocks += 1
        self.knocked.set()
        return "taken" if self.answers else ""

    async def ask(self, *_: object) -> Status:
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def followed(door: Slot) -> AsyncIterator[tuple[Links, asyncio.Event]]:
    changed = asyncio.Event()
    links = Links(changed.set, Control(door.ask, door.watch, door.knock))
    links.follow({"a": Endpoint(HOST, 1, "")})
    await door.heard.wait()
    changed.clear()
    try:
        yield links, changed
    finally:
        await links.close()


@pytest.mark.parametrize("broken", [True, False], ids=["its connection ends", "others miss it"])
async def test_who_answers_no_knock_is_unreachable_at_once(broken: bool) -> None:  # noqa: FBT001
    door = Slot(FakeSlot("a").status())
    async with followed(door) as (links, changed):
        door.answers = False
        door.breaks() if broken else links.doubt("a")
        await changed.wait()
        assert (links.statuses, links.unreachable) == ({}, {"a"})


async def test_who_answers_a_knock_is_waited_for() -> None:
    door = Slot(FakeSlot("a").status())
    async with followed(door) as (links, _):
        door.breaks()
        links.doubt("a")  # who is knocked at already is not knocked at twice
        await door.knocked.wait()
        assert (set(links.statuses), links.unreachable, door.knocks) == ({"a"}, set(), 1)
        links.doubt("nobody")


async def test_who_falls_silent_is_knocked_at_and_forgotten_with_its_name() -> None:
    door = Slot(FakeSlot("a").status(), None)
    door.answers = False
    async with followed(door) as (links, changed):
        while not links.unreachable:
            await changed.wait()
        links.follow({})
        assert links.unreachable == set()


async def test_who_speaks_again_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Slot(FakeSlot("a").status())
    monkeypatch.setattr("strata_operator.act.control_client.KNOCK_AGAIN_SECONDS", 0.0)
    async with followed(door) as (links, changed):
        door.answers = False
        links.doubt("a")
        await changed.wait()
        changed.clear()
        door.answers = True
        await changed.wait()
        assert links.unreachable == set()


async def test_nobody_is_asked_for_long_where_nobody_is() -> None:
    door = Slot(FakeSlot("a").status())
    async with followed(door) as (links, _):
        door.answers = False
        assert not await links.all_answer(["a"], timeout_seconds=3600)
        assert links.statuses == {}
