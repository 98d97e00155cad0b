"""A stock that watches keep current, whatever the API server does: forgets versions, breaks off, repeats itself, refuses, says nothing."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kubernetes.client
import pytest

from strata_operator.errors import NotReadyError
from strata_operator.observe import watches
from strata_operator.observe.kube import NODES, PODS, ForbiddenError, Kube, ServerError, refusal
from strata_operator.observe.kube import Request as Sent
from strata_operator.observe.source import Lists
from strata_operator.observe.streams import HttpStreams
from strata_operator.observe.watches import Watches
from tests.operator.builders import a_node
from tests.operator.fake_api import FakeApi, Request

Object = dict[str, Any]
LLMDS = "/apis/strata.dev/v1alpha1/namespaces/ns/llmdeployments"


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(watches, "FIRST_SECONDS", 2.0)


class InProcess:
    """A wire to a fake API server without a network."""

    def __init__(self, api: FakeApi) -> None:
        self._api = api

    def beside(self) -> "InProcess":
        return self

    async def send(self, request: Sent, seconds: Callable[[], float]) -> tuple[int, Any]:
        seconds()
        await asyncio.sleep(0)
        query = {name: [value] for name, value in request.query}
        return self._api.answer(Request(request.method, request.path, query, request.content_type, request.body))


class Said:
    """Watches that say what the test lets them: `say` to all of a plural, `end` them, or have the next ones meet a refusal."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []  # plural and version
        self.refusals: dict[str, list[NotReadyError]] = {}
        self._open: dict[str, list[asyncio.Queue[bytes | NotReadyError | None]]] = {}

    def say(self, plural: str, *lines: bytes | NotReadyError | None) -> None:
        for queue in self._open.get(plural, []):
            for line in lines:
                queue.put_nowait(line)

    async def lines(self, path: str, query: dict[str, str], connected: Callable[[], None]) -> AsyncGenerator[bytes]:
        plural = path.rsplit("/", 1)[1]
        self.opened.append((plural, query["resourceVersion"]))
        if self.refusals.get(plural):
            raise self.refusals[plural].pop(0)
        connected()
        queue: asyncio.Queue[bytes | NotReadyError | None] = asyncio.Queue()
        self._open.setdefault(plural, []).append(queue)
        try:
            while (line := await queue.get()) is not None:
                if isinstance(line, NotReadyError):
                    raise line
                yield line
        finally:
            self._open[plural].remove(queue)

    async def close(self) -> None: ...


def event(kind: str, thing: Object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode()


class World:
    """An API server, what its watches say, and a stock that follows both."""

    def __init__(self) -> None:
        self.api, self.said = FakeApi(), Said()
        self.changes = 0
        self.source: Watches
        self.node("a")

    def node(self, name: str) -> Object:
        self.api.put(f"/api/v1/nodes/{name}", a_node(name).with_gpus("Tesla-T4", 1).build())
        return self.api.objects[f"/api/v1/nodes/{name}"]

    def gone(self, name: str) -> Object:
        thing = self.api.objects.pop(f"/api/v1/nodes/{name}")
        self.api.put("/api/v1/namespaces/x/configmaps/other", {"metadata": {"name": "other", "namespace": "x"}})
        version = self.api.objects["/api/v1/namespaces/x/configmaps/other"]["metadata"]["resourceVersion"]
        return {**thing, "metadata": {**thing["metadata"], "resourceVersion": version}}

    def names(self) -> set[str]:
        return set(self.source.stock.node_views())

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():  # noqa: ASYNC110  of what is inside, nobody tells
                await asyncio.sleep(0.001)

    def lists(self, plural: str) -> int:
        return sum(request.method == "GET" and request.path.endswith(plural) for request in self.api.requests)


@asynccontextmanager
async def a_world(*namespaces: str, refuse: Any = None) -> AsyncIterator[World]:
    world = World()
    if refuse is not None:
        world.api.refuse = refuse

    def changed() -> None:
        world.changes += 1

    world.source = Watches(Kube(InProcess(world.api)), world.said, namespaces, changed)
    try:
        yield world
    finally:
        await world.source.close()


async def test_it_lists_once_and_then_hears() -> None:
    async with a_world() as world:
        await world.source.refresh()
        assert world.names() == {"a"}
        await world.until(lambda: "nodes" in dict(world.said.opened))
        before = world.changes
        world.said.say("nodes", event("ADDED", world.node("b")))
        await world.until(lambda: world.names() == {"a", "b"})
        assert world.changes > before
        world.said.say("nodes", event("DELETED", world.gone("a")))
        await world.until(lambda: world.names() == {"b"})
        await world.source.refresh()
        assert world.lists("/nodes") == 1


async def test_a_watch_that_ends_goes_on_from_the_version_heard_last() -> None:
    async with a_world() as world:
        await world.source.refresh()
        await world.until(lambda: "nodes" in dict(world.said.opened))
        added = world.node("b")
        world.said.say("nodes", event("ADDED", added), event("BOOKMARK", {"metadata": {"resourceVersion": "77"}}), None)
        await world.until(lambda: ("nodes", "77") in world.said.opened)
        assert world.lists("/nodes") == 1


ENDS: dict[str, bytes | NotReadyError] = {
    "the version is forgotten": event("ERROR", {"code": 410, "message": "too old resource version"}),
    "the version is forgotten at once": refusal(410, "GET nodes", "too old"),
    "the version is wrong": refusal(422, "GET nodes", "invalid"),
    "too many ask": refusal(429, "GET nodes", "later"),
    "a line is no event": b'{"type": "ADDED", "object": {"meta',
    "a line is no text": b"\xff\xfe",
    "an event has no object": b'{"type": "ADDED"}',
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_what_cannot_be_gone_on_from_is_listed_anew(end: bytes | NotReadyError) -> None:
    """What was deleted meanwhile is gone, what was added is there."""
    async with a_world() as world:
        await world.source.refresh()
        await world.until(lambda: "nodes" in dict(world.said.opened))
        world.node("b")
        world.gone("a")
        if isinstance(end, NotReadyError):
            world.said.refusals["nodes"] = [end]
            world.said.say("nodes", None)
        else:
            world.said.say("nodes", end)
        await world.until(lambda: world.names() == {"b"})
        await world.source.refresh()


@pytest.mark.parametrize("end", [ServerError("500"), NotReadyError("the watch broke")], ids=str)
async def test_a_break_is_taken_up_where_it_was(end: NotReadyError) -> None:
    async with a_world() as world:
        await world.source.refresh()
        await world.until(lambda: "nodes" in dict(world.said.opened))
        world.said.refusals["nodes"] = [end, end]
        world.said.say("nodes", end)
        await world.until(lambda: [plural for plural, _ in world.said.opened].count("nodes") == 4)
        assert len({version for plural, version in world.said.opened if plural == "nodes"}) == 1
        assert world.lists("/nodes") == 1
        world.said.say("nodes", event("ADDED", world.node("b")))
        await world.until(lambda: world.names() == {"a", "b"})


async def test_events_that_come_twice_or_late_change_nothing() -> None:
    async with a_world() as world:
        await world.source.refresh()
        await world.until(lambda: "nodes" in dict(world.said.opened))
        first = world.node("b")
        second = world.node("b")
        end = world.gone("b")
        world.said.say("nodes", event("MODIFIED", second), event("ADDED", first))
        await world.until(lambda: "b" in world.names())
        world.said.say("nodes", event("DELETED", end), event("MODIFIED", second), event("DELETED", end))
        world.said.say("nodes", event("ADDED", world.node("c")))
        await world.until(lambda: "c" in world.names())
        assert world.names() == {"a", "c"}


async def test_a_look_waits_for_the_first_lists_and_rests_on_nothing_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "FIRST_SECONDS", 0.05)
    is_away = True
    async with a_world(refuse=lambda _: (503, "away") if is_away else None) as world:
        with pytest.raises(NotReadyError, match=r"have not been heard of for .*503"):
            await world.source.refresh()
        is_away = False
        await world.until(lambda: world.names() == {"a"})
        await world.until(lambda: "nodes" in dict(world.said.opened))
        await world.source.refresh()
        monkeypatch.setattr(watches, "BEHIND_SECONDS", 0.0)
        world.said.refusals["nodes"] = [NotReadyError("silence")] * 1000
        world.said.say("nodes", None)
        await world.until(lambda: len(world.said.refusals["nodes"]) < 998)
        with pytest.raises(NotReadyError, match=r"nodes have not been heard of.*silence"):
            await world.source.refresh()


async def test_a_namespace_that_may_not_be_read_is_left_out_and_comes_back_whole() -> None:
    forbidden = False

    def refuse(request: Request) -> tuple[int, str] | None:
        return (403, "no") if forbidden and request.path.endswith("/ns/secrets") else None

    async with a_world("ns", "other", refuse=refuse) as world:
        world.api.put(f"{LLMDS}/chat", {"metadata": {"name": "chat", "namespace": "ns"}, "spec": {}})
        await world.source.refresh()
        assert [thing["metadata"]["name"] for thing in world.source.stock.deployments] == ["chat"]
        await world.until(lambda: "secrets" in dict(world.said.opened))
        forbidden = True
        world.said.say("secrets", refusal(422, "GET", "invalid"))
        await world.until(lambda: bool(world.source._forbidden()))
        await world.source.refresh()
        assert not world.source.stock.deployments
        assert set(world.source.stock.unread) == {"ns"}
        forbidden = False
        await world.until(lambda: not world.source._forbidden())
        await world.source.refresh()
        assert [thing["metadata"]["name"] for thing in world.source.stock.deployments] == ["chat"]
        assert not world.source.stock.unread


async def test_of_two_namespaces_left_out_one_comes_back_and_the_other_stays_left_out() -> None:
    """Or pods of the other would look like those of deployments that are gone."""
    forbidden = {"ns", "other"}

    def refuse(request: Request) -> tuple[int, str] | None:
        return (403, "no") if any(f"/{name}/" in request.path for name in forbidden) else None

    async with a_world("ns", "other", "third", refuse=refuse) as world:
        world.api.put(f"{LLMDS}/chat", {"metadata": {"name": "chat", "namespace": "ns"}, "spec": {}})
        await world.source.refresh()
        stock = world.source.stock
        assert (set(stock.unread), stock.deployments) == (forbidden, ())
        await world.source.led()
        assert set(stock.unread) == forbidden
        forbidden = {"other"}
        await world.until(lambda: set(world.source._forbidden()) == forbidden)
        await world.source.refresh()
        assert set(stock.unread) == forbidden
        assert [thing["metadata"]["name"] for thing in stock.deployments] == ["chat"]


async def test_a_namespace_that_comes_back_is_listed_until_a_list_of_it_is_whole() -> None:
    answer = (403, "no")

    def refuse(request: Request) -> tuple[int, str] | None:
        return answer if answer and request.path.endswith("/ns/secrets") else None

    async with a_world("ns", "other", refuse=refuse) as world:
        await world.source.refresh()
        lists = Lists(world.source._kube, ("ns", "other"))
        await lists.refresh()
        assert set(lists.stock.unread) == {"ns"}
        answer = (500, "away")
        for source in (world.source, lists):
            source.stock.unread = {"ns": "no"}
            world.source._forbidden = dict  # type: ignore[method-assign]  they say by now that they may be read
            with pytest.raises(ServerError):
                await source.refresh()
            assert set(source.stock.unread) == {"ns"}


async def test_a_new_leader_that_may_read_no_namespace_says_so() -> None:
    async with a_world("ns", refuse=lambda request: (403, "no") if "/ns/" in request.path else None) as world:
        for ask in (world.source.refresh, world.source.led):
            with pytest.raises(ForbiddenError):
                await ask()


async def test_where_no_namespace_may_be_read_the_look_fails() -> None:
    async with a_world("ns", refuse=lambda request: (403, "no") if "/ns/" in request.path else None) as world:
        with pytest.raises(ForbiddenError):
            await world.source.refresh()


async def test_a_new_leader_sees_what_no_watch_has_told_yet() -> None:
    async with a_world() as world:
        await world.source.refresh()
        world.api.put(f"{LLMDS}/chat", {"metadata": {"name": "chat", "namespace": "ns"}, "spec": {}})
        await world.source.refresh()
        assert not world.source.stock.deployments
        await world.source.led()
        assert [thing["metadata"]["name"] for thing in world.source.stock.deployments] == ["chat"]


async def test_an_epoch_is_not_seen_without_its_secret() -> None:
    """Its ConfigMap's watch is faster than its Secret's."""
    labels = {"app.kubernetes.io/managed-by": "strata", "app.kubernetes.io/instance": "chat", "strata.dev/epoch": "1"}
    thing = {"metadata": {"name": "chat-epoch-1", "namespace": "ns", "labels": labels}}
    async with a_world() as world:
        await world.source.refresh()
        await world.until(lambda: "configmaps" in dict(world.said.opened))
        for plural in ("secrets", "configmaps"):
            world.api.put(f"/api/v1/namespaces/ns/{plural}/chat-epoch-1", thing)
        config_map = world.api.objects["/api/v1/namespaces/ns/configmaps/chat-epoch-1"]
        world.said.say("configmaps", event("ADDED", config_map))
        await world.until(lambda: bool(world.source.stock.half_epochs()))
        await world.source.refresh()
        assert not world.source.stock.half_epochs()
        assert sum(each.path == "/api/v1/namespaces/ns/secrets" for each in world.api.requests) == 1
        world.api.objects.pop("/api/v1/namespaces/ns/secrets/chat-epoch-1")
        lists = world.lists("/secrets")
        await world.source.refresh()
        assert world.lists("/secrets") == lists


@asynccontextmanager
async def an_http_server(*answers: bytes, stays: bool = False) -> AsyncIterator[str]:
    """Says these bytes to each request in turn, then closes, or stays and says no more."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        await writer.drain()
        if stays:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def heard(url: str, idle_seconds: float = 5.0) -> tuple[list[bytes], NotReadyError | None]:
    configuration = kubernetes.client.Configuration()
    configuration.host = url
    streams = HttpStreams(configuration, idle_seconds)
    lines: list[bytes] = []
    try:
        async for line in streams.lines("/api/v1/nodes", {"watch": "true"}, lambda: None):
            lines.append(line)  # noqa: PERF401  those before an error count
    except NotReadyError as error:
        return lines, error
    finally:
        await streams.close()
    return lines, None


async def test_lines_are_whole_however_they_are_cut() -> None:
    long = b"x" * 300_000  # a line longer than what readers of lines take
    async with an_http_server(HEAD + chunk(b"one\ntw") + chunk(b"o\n" + long) + chunk(b"\n") + chunk(b"")) as url:
        assert await heard(url) == ([b"one", b"two", long], None)


async def test_a_connection_that_breaks_in_a_line_gives_none_of_it() -> None:
    async with an_http_server(HEAD + chunk(b'one\n{"type": "ADD')) as url:
        lines, error = await heard(url)
    assert lines == [b"one"]
    assert "broke" in str(error)


async def test_refusals_and_silence_are_told_apart() -> None:
    async with an_http_server(b"HTTP/1.1 410 Gone\r\nContent-Length: 3\r\n\r\nold") as url:
        lines, error = await heard(url)
        assert (lines, type(error)) == ([], type(refusal(410, "", "")))
        assert "old" in str(error)
    async with an_http_server(HEAD + chunk(b"one\n"), stays=True) as url:
        lines, error = await heard(url, idle_seconds=0.05)
        assert lines == [b"one"]
        assert type(error) is NotReadyError
    assert type((await heard("http://127.0.0.1:1"))[1]) is NotReadyError


@pytest.mark.parametrize("name", ["BearerToken", "authorization"])  # as releases of the client call it
async def test_the_token_is_asked_for_with_every_connection(name: str) -> None:
    tokens = iter(["first", "second"])
    configuration = kubernetes.client.Configuration()

    def refresh(of: kubernetes.client.Configuration) -> None:
        of.api_key = {name: f"Bearer {next(tokens)}"}

    configuration.api_key = {name: "Bearer none"}
    configuration.refresh_api_key_hook = refresh
    streams = HttpStreams(configuration)
    assert [streams._credentials() for _ in range(2)] == [
        {"authorization": "Bearer first"},
        {"authorization": "Bearer second"},
    ]


def test_what_everybody_has_is_followed_too() -> None:
    assert {each.kind for each in watches.SHARED} == {NODES, PODS}
