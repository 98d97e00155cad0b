"""Connections are bounded: slow, silent and greedy clients lose theirs, and others are served meanwhile."""

import asyncio
import json
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from uvicorn.server import ServerState

from strata_planner.contract.frames import Sampling
from strata_runtime.gateway.http.connections import ACCEPTED_AT_ONCE, LEAST_READ_BYTES, BoundedServer, server_config
from strata_runtime.gateway.routing.journal import GenerationRequest
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, a_gateway

HEADERS = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LONG = 60.0  # never in a test


@asynccontextmanager
async def serving(tokenizer: Tokenizer, leader: FakeLeader, **limits: Any) -> AsyncIterator[tuple[Harness, str]]:
    slow = {"header_seconds": LONG, "body_seconds": LONG, "write_seconds": LONG}
    async with a_gateway(tokenizer, limits=Limits(**(slow | limits))) as gateway:
        await gateway.connect(leader)
        async with gateway.serving() as url:
            yield gateway, url


class Connection:
    """A client that sends what it likes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def open(self, url: str) -> "Connection":
        parts = urlsplit(url)
        self.reader, self.writer = await asyncio.open_connection(parts.hostname, parts.port)
        return self

    def send(self, text: str) -> None:
        self.writer.write(text.encode())

    async def end(self) -> bytes:
        """What comes until the server closes."""
        try:
            return await asyncio.wait_for(self.reader.read(), 20)
        except ConnectionResetError:
            return b"reset"
        finally:
            self.writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param("", id="nothing"),
        pytest.param("GET /hea", id="half a request line"),
        pytest.param(HEADERS, id="half the headers"),
    ],
)
async def test_headers_must_come_in_time(tokenizer: Tokenizer, leader: FakeLeader, sent: str) -> None:
    async with serving(tokenizer, leader, header_seconds=0.05) as (_, url):
        connection = await Connection().open(url)
        connection.send(sent)
        answer = await connection.end()
        assert b"408" in answer
        assert b"--header-seconds" in answer


@pytest.mark.parametrize("before", ["", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "second"])
async def test_bodies_must_come_in_time(tokenizer: Tokenizer, leader: FakeLeader, before: str) -> None:
    async with serving(tokenizer, leader, body_seconds=0.05) as (_, url):
        connection = await Connection().open(url)
        connection.send(before + HEADERS + 'Content-Length: 100\r\n\r\n{"model":')
        answer = await connection.end()
        assert b"408 Request Timeout" in answer
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "server_error"


async def test_an_answer_may_take_longer_than_its_request(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    """Neither time-out runs on while a request is answered, nor on a second one of a connection that is kept."""
    leader.allow(1)
    async with (
        serving(tokenizer, leader, header_seconds=0.2, body_seconds=0.2) as (_, url),
        httpx.AsyncClient() as client,
    ):
        for _ in range(2):
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            running = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await leader.until(lambda: leader.running)
            await asyncio.sleep(0.3)  # longer than both: nothing tells that no timer went off
            leader.allow(None)
            assert (await running).status_code == 200
            leader.allow(1)


async def test_the_longest_idle_connection_makes_room(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with serving(tokenizer, leader, max_connections=4) as (_, url), httpx.AsyncClient() as client:
        idle = [await Connection().open(url) for _ in range(4)]
        assert (await client.get(f"{url}/health")).status_code == 200
        assert await idle[0].end() in {b"", b"reset"}
        for connection in idle[1:]:
            connection.writer.close()


async def test_where_all_are_at_work_a_new_one_is_refused(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    leader.allow(0)
    async with serving(tokenizer, leader, max_connections=2) as (gateway, url), httpx.AsyncClient() as client:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
        running = [asyncio.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(2)]
        await leader.until(lambda: len(leader.running) == 2)
        connection = await Connection().open(url)
        answer = await connection.end()
        assert b"503 Service Unavailable" in answer
        assert b"2 connections are open" in answer
        leader.allow(None)
        assert [(await task).status_code for task in running] == [200, 200]
        assert gateway.dispatcher.status().running_requests == 0


async def test_a_client_that_never_reads_loses_its_connection_and_the_kernel_what_it_kept_for_it() -> None:
    async def talks(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):  # more than a kernel keeps for a connection
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})

    config, state = server_config(talks, Limits(write_seconds=0.01)), ServerState()
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        ended = select.poll()
        ended.register(client, select.POLLRDHUP)  # an orderly end comes behind what is not read: it would not be seen
        assert await asyncio.to_thread(ended.poll, 10_000)
    await asyncio.gather(*state.tasks)
    server.close()
    await server.wait_closed()


async def test_a_client_that_reads_slowly_gets_its_whole_answer() -> None:
    config = server_config(lambda *_: None, Limits(write_seconds=0.01))
    config.load()
    protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
    transport = SlowTransport([10 * LEAST_READ_BYTES, *range(9 * LEAST_READ_BYTES, 0, -LEAST_READ_BYTES), 1])
    protocol.connection_made(transport)
    protocol.pause_writing()
    await asyncio.wait_for(transport.aborted.wait(), 10)
    assert transport.unread == []
    protocol.connection_lost(ConnectionAbortedError())


class SlowTransport(asyncio.Transport):
    """What its client has left unread, look by look."""

    def __init__(self, unread: list[int]) -> None:
        super().__init__()
        self.unread, self.aborted = unread, asyncio.Event()
        self._socket = socket.socket()

    def get_write_buffer_size(self) -> int:
        return self.unread[0] if len(self.unread) == 1 else self.unread.pop(0)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def abort(self) -> None:
        self.unread.clear()
        self._socket.close()
        self.aborted.set()


async def test_unread_events_are_bounded(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(max_unread_events=5)) as gateway:
        await gateway.connect(leader)
        generation = gateway.dispatcher.open([GenerationRequest("r", (5,), 400, (), Sampling())])
        await leader.until(lambda: leader.aborts)
        assert generation._queue.qsize() == 7, "six events and the reason"
        assert gateway.dispatcher.status().running_requests == 0


async def test_who_reads_nothing_costs_nobody_else_a_token(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    """The events of all answers of a step come in one message; the first of them may end the others of its request."""
    async with a_gateway(tokenizer, limits=Limits(max_unread_events=5)) as gateway:
        await gateway.connect(leader)
        greedy = {"max_tokens": 40, "stop_tokens": (), "sampling": Sampling()}
        leader.allow(0)
        gateway.dispatcher.open([GenerationRequest(name, (5,), **greedy) for name in ("a", "b")])
        reader = gateway.dispatcher.open([GenerationRequest("c", (5,), **greedy)])
        await leader.until(lambda: len(leader.submits) == 3)
        for index in range(40):
            leader.allow(1)
            assert (await asyncio.wait_for(reader.next(), 10))[1].index == index
        assert len(leader.submits) == 3, "nothing is replayed: no link was lost"
        assert gateway.dispatcher.status().running_requests == 0


@pytest.mark.parametrize(
    "framing",
    [
        pytest.param("Content-Length: 40\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="length and chunks"),
        pytest.param("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", id="chunks and length"),
        pytest.param("Content-Length: 0\r\nContent-Length: 40\r\n\r\n", id="two lengths"),
        pytest.param("Content-Length: 0, 40\r\n\r\n", id="a list of lengths"),
        pytest.param("Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n", id="an odd coding"),
        pytest.param("Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n", id="a space before the colon"),
    ],
)
async def test_requests_of_two_lengths_get_one_answer(tokenizer: Tokenizer, leader: FakeLeader, framing: str) -> None:
    async with serving(tokenizer, leader) as (_, url):
        connection = await Connection().open(url)
        connection.send(HEADERS + framing + "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await connection.end()
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))


async def test_bodies_in_tiny_chunks_end_early(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with serving(tokenizer, leader) as (_, url):
        connection = await Connection().open(url)
        connection.send(HEADERS + "Transfer-Encoding: chunked\r\n\r\n" + "1\r\nx\r\n" * 3000)
        assert (await connection.end()).startswith(b"HTTP/1.1 400")


async def test_bodies_in_ordinary_chunks(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 1, "user": "x" * 100_000})
    chunks = "".join(f"64\r\n{body[start : start + 100]:100}\r\n" for start in range(0, len(body), 100))
    async with serving(tokenizer, leader) as (_, url):
        connection = await Connection().open(url)
        connection.send(HEADERS + f"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n")
        assert (await connection.end()).startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_behind_an_answer_under_way(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with serving(tokenizer, leader) as (_, url):
        connection = await Connection().open(url)
        connection.send("POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await connection.reader.readline()).startswith(b"HTTP/1.1 404")
        connection.send("no chunk\r\n")
        assert b"HTTP/1.1" not in await connection.end()


async def test_a_rush_of_clients_leaves_turns_to_others() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = BoundedServer(server_config(app, Limits()))
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(10 * ACCEPTED_AT_ONCE)]
        counts = [0]
        while counts[-1] < len(clients):
            await asyncio.sleep(0)
            counts.append(len(server.server_state.connections))
        assert max(after - before for before, after in pairwise(counts)) <= ACCEPTED_AT_ONCE
        for client in clients:
            client.close()
        server.should_exit = True
        await serving
