"""Two gateways that keep each other's answers: the death of one breaks the connection, and the other goes on."""

import asyncio
import contextlib
import itertools
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.frames import TokenEvent
from strata_runtime.gateway.errors import StartError
from strata_runtime.gateway.keeping.birth import Birth
from strata_runtime.gateway.keeping.changes import Begun, Change, Ended, Grown
from strata_runtime.gateway.keeping.keeper import Keeper, Wish
from strata_runtime.gateway.keeping.positions import LONGEST_ID, MOST_NAMED, Trace, is_of, read, told
from strata_runtime.gateway.keeping.record import Record
from strata_runtime.gateway.keeping.twins import TwinLinks
from strata_runtime.gateway.settings import Limits, Peer
from strata_runtime.gateway.text.tokenizer import Tokenizer
from strata_runtime.wire.transport import Keys
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, a_gateway, a_leader, scripted
from tests.runtime.gateway.test_kept_answers import FOX, KEY, body, stream, whole_stream, without_names

SECRET = "of the journals"


@dataclass
class Twin:
    """A gateway with its links, behind real HTTP."""

    harness: Harness
    links: TwinLinks
    http: httpx.AsyncClient

    @property
    def keeper(self) -> Keeper:
        return self.harness.gateway.keeper

    async def dies(self) -> None:
        """As a kill would: nobody is told anything more, its leaders' connections end."""
        await self.links.close()
        await self.harness.dispatcher.close()


@contextlib.asynccontextmanager
async def a_twin(tokenizer: Tokenizer, leader: FakeLeader, limits: Limits | None = None) -> AsyncIterator[Twin]:
    async with a_gateway(tokenizer, limits=limits) as harness, harness.serving() as url:
        keeper, own = harness.gateway.keeper, harness.dispatcher.incarnation
        links = TwinLinks(own, "127.0.0.1", 0, Keys.of(SECRET), keeper.hear, keeper.kept)
        keeper.twins = links
        await harness.connect(leader)
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            yield Twin(harness, links, http)
        await links.close()


async def until(condition: object) -> None:
    """Of two processes' sockets: no one event tells."""
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def know_each_other(*twins: Twin) -> None:
    for twin in twins:
        twin.links.follow([Peer("127.0.0.1", each.links.port) for each in twins])  # itself among them
    await until(lambda: all(twin.links.connected == len(twins) - 1 and twin.links.knows_all for twin in twins))


@pytest.fixture
async def twins(tokenizer: Tokenizer, leader: FakeLeader) -> AsyncIterator[tuple[Twin, Twin]]:
    leader.model = scripted(tokenizer, FOX)
    async with a_twin(tokenizer, leader) as one, a_twin(tokenizer, leader) as other:
        await know_each_other(one, other)
        yield one, other


def kept(twin: Twin) -> list[bytes]:
    """Of the one answer that it keeps."""
    records = list(twin.keeper._records.values())
    return records[0].entries if len(records) == 1 else []


async def test_a_stream_goes_on_at_the_other_gateway(twins: tuple[Twin, Twin], leader: FakeLeader) -> None:
    one, other = twins
    whole = without_names(await whole_stream(one.http, "/v1/completions"))
    leader.allow(5)
    async with stream(one.http) as first:
        seen = [await first.next() for _ in range(4)]
        await one.dies()
    leader.allow(None)
    async with stream(other.http, after=first.last_id) as second:
        seen += await second.rest()
    assert without_names(seen) == whole
    assert len(leader.submits[-1].delivered) >= 4, "what the client has is not drawn again"


async def test_what_the_other_lacks_is_in_the_id(twins: tuple[Twin, Twin], leader: FakeLeader) -> None:
    """The tokens that were shown and not confirmed: another draw must not take their place."""
    one, other = twins
    whole = without_names(await whole_stream(one.http, "/v1/completions"))
    one.links.tell = lambda change: None if isinstance(change, Grown) else TwinLinks.tell(one.links, change)  # type: ignore[method-assign]
    leader.allow(5)
    async with stream(one.http) as first:
        seen = [await first.next() for _ in range(4)]
        await one.dies()
    assert len(other.keeper) == 2
    leader.model = lambda prompt, index: 5  # as bf16 might: the rest differs, what was shown stays
    leader.allow(None)
    async with stream(other.http, after=first.last_id) as second:
        rest = await second.rest()
    assert without_names(seen) == whole[:4]
    assert len(leader.submits[-1].delivered) == 4
    assert without_names(rest)[0] != whole[4]


async def test_a_whole_answer_is_told_by_the_other(twins: tuple[Twin, Twin], leader: FakeLeader) -> None:
    one, other = twins
    headers = {"Idempotency-Key": KEY}
    first = await one.http.post("/v1/completions", json=body(), headers=headers)
    await until(lambda: len(kept(other)) == len(kept(one)))
    await one.dies()
    again = await other.http.post("/v1/completions", json=body(), headers=headers)
    assert again.text == first.text
    assert len(leader.submits) == 1


async def test_what_runs_is_taken_over_from_a_gateway_that_lives(twins: tuple[Twin, Twin], leader: FakeLeader) -> None:
    """The Service leads a client elsewhere: the answer goes on there, and ends here."""
    one, other = twins
    headers = {"Idempotency-Key": KEY}
    leader.allow(4)
    first = asyncio.create_task(one.http.post("/v1/completions", json=body(), headers=headers))
    await until(lambda: len(kept(other)) == 4)
    second = asyncio.create_task(other.http.post("/v1/completions", json=body(), headers=headers))
    assert ((await first).status_code, (await first).json()["error"]["code"]) == (409, "taken_over")
    leader.allow(None)
    assert (await second).json()["usage"]["completion_tokens"] == 10
    assert [len(submit.delivered) for submit in leader.submits] == [0, 4]
    await until(lambda: kept(one) == kept(other))
    assert not one.harness.dispatcher.status().running_requests


async def test_a_gateway_that_starts_later_is_told_what_there_is(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    leader.model = scripted(tokenizer, FOX)
    async with a_twin(tokenizer, leader) as one:
        leader.allow(4)
        async with stream(one.http) as first:
            seen = [await first.next() for _ in range(3)]
            async with a_twin(tokenizer, leader) as other:
                await know_each_other(one, other)
                await until(lambda: kept(other) == kept(one))
                await one.dies()
                leader.allow(None)
                async with stream(other.http, after=first.last_id) as second:
                    seen += await second.rest()
    assert len([event for event in seen if "text" in event]) == 10


async def test_a_gateway_that_begins_learns_of_what_one_that_is_no_more_has_made(
    tokenizer: Tokenizer, leader: FakeLeader
) -> None:
    """Found by the checker: the client came to it before anybody had told it, or to be told was nobody left."""
    leader.model = scripted(tokenizer, FOX)
    async with a_twin(tokenizer, leader) as one, a_twin(tokenizer, leader) as other:
        await know_each_other(one, other)
        leader.allow(4)
        async with stream(one.http) as first:
            seen = [await first.next() for _ in range(3)]
            await until(lambda: kept(other) == kept(one))
            await one.dies()
        async with a_twin(tokenizer, leader) as third:
            third.links.follow([Peer("127.0.0.1", other.links.port)])
            early = await third.http.post("/v1/completions", json=body(), headers={"Idempotency-Key": KEY})
            assert (early.status_code, "has just begun" in early.text) == (503, True)
            await until(lambda: third.links.knows_all)
            leader.allow(None)
            async with stream(third.http, after=first.last_id) as second:
                seen += await second.rest()
    assert len([event for event in seen if "text" in event]) == 10


async def test_a_leader_and_a_gateway_die_together(twins: tuple[Twin, Twin], leader: FakeLeader) -> None:
    one, other = twins
    whole = without_names(await whole_stream(one.http, "/v1/completions"))
    leader.allow(5)
    async with stream(one.http) as first:
        seen = [await first.next() for _ in range(4)]
        await asyncio.gather(one.dies(), leader.stop())
    async with a_leader(leader.model, epoch=2) as successor:
        await other.harness.connect(successor)
        async with stream(other.http, after=first.last_id) as second:
            seen += await second.rest()
        assert without_names(seen) == whole
        assert len(successor.submits[0].delivered) >= 4
    await leader.start()


async def test_a_gateway_that_is_asked_to_end_leaves_its_answers_to_the_other(
    tokenizer: Tokenizer, leader: FakeLeader
) -> None:
    leader.model = scripted(tokenizer, FOX)
    async with a_twin(tokenizer, leader, Limits(drain_seconds=0.0)) as one, a_twin(tokenizer, leader) as other:
        await know_each_other(one, other)
        whole = without_names(await whole_stream(one.http, "/v1/completions"))
        leader.allow(5)
        async with stream(one.http) as first:
            seen = [await first.next() for _ in range(4)]
            await one.harness.dispatcher.drain()
            told = await first.rest()
        assert "shutting down" in told[-1]
        seen += told[:-1]
        leader.allow(None)
        async with stream(other.http, after=first.last_id) as second:
            seen += await second.rest()
        assert without_names(seen) == whole


async def test_what_nobody_comes_back_for_is_dropped_by_both(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    limits = Limits(resume_seconds=0.05)
    async with a_twin(tokenizer, leader, limits) as one, a_twin(tokenizer, leader) as other:
        await know_each_other(one, other)
        leader.allow(6)
        async with stream(one.http, max_tokens=100) as first:
            await first.next()
            await until(lambda: kept(other))
        await until(lambda: not len(other.keeper))
        assert not len(one.keeper)


async def test_strangers_tell_nothing(twins: tuple[Twin, Twin]) -> None:
    one, _ = twins
    heard: list[Change] = []
    stranger = TwinLinks(
        "x", "127.0.0.1", 0, Keys.of("guessed"), lambda change, _: heard.append(change), lambda: iter([])
    )
    stranger.connect([f"tcp://127.0.0.1:{one.links.port}"])
    one.links.connect([*one.links._links, f"tcp://127.0.0.1:{stranger.port}"])
    await one.http.post("/v1/completions", json=body(), headers={"Idempotency-Key": KEY})
    assert (stranger.connected, one.links.connected, heard) == (0, 1, [])
    await stranger.close()


async def test_a_port_in_use_is_told(twins: tuple[Twin, Twin]) -> None:
    with pytest.raises(StartError, match=r"--journal-port .*in use"):
        TwinLinks("x", "127.0.0.1", twins[0].links.port, Keys.of(SECRET), print, lambda: iter([]))


async def test_two_that_begin_the_same_at_once(twins: tuple[Twin, Twin]) -> None:
    """One goes on; what the other is told has it sent again, for the same answer."""
    headers = {"Idempotency-Key": KEY}
    for attempt in range(8):
        headers = {"Idempotency-Key": f"{KEY} {attempt}"}
        both = [each.http.post("/v1/completions", json=body(), headers=headers) for each in twins]
        answers = await asyncio.gather(*both)
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(refused) < 2
        assert {(each.status_code, each.headers["retry-after"]) for each in refused} <= {(409, "1")}


PAGE = Path(__file__).parents[3] / "docs/openai-api.md"


@pytest.mark.slow  # waits as a client does; those above have each thing that it meets
async def test_the_documented_client_loses_nothing(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    """Through an address whose connections break, and that leads to another gateway each time."""
    leader.model = scripted(tokenizer, FOX)
    (code,) = re.findall(r"```python\n(def stream\(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    async with a_twin(tokenizer, leader) as one, a_twin(tokenizer, leader) as other:
        await know_each_other(one, other)
        turns = itertools.cycle([one.http.base_url, other.http.base_url])
        sent: list[str] = []
        leading: set[asyncio.Task[None] | None] = set()

        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """A request, and 700 bytes of its answer: some three events more than the last time."""
            leading.add(asyncio.current_task())
            url = next(turns)
            request = await reader.readuntil(b"\r\n\r\n")
            sent.append(request.decode())
            length = int(re.findall(rb"content-length: (\d+)", request, flags=re.IGNORECASE)[0])
            there, to = await asyncio.open_connection(url.host, url.port)
            to.write(request + await reader.readexactly(length))
            for _ in range(700):
                if not (byte := await there.read(1)):
                    break
                writer.write(byte)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            for end in (writer, to):
                end.close()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

        server = await asyncio.start_server(lead, "127.0.0.1", 0)
        names = {"URL": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "httpx": httpx, "uuid": uuid}
        names["time"] = SimpleNamespace(sleep=lambda _: None)
        exec(code, names)
        told = await asyncio.to_thread(lambda: list(names["stream"](body())))
        server.close()
        await server.wait_closed()
        await asyncio.gather(*filter(None, leading))
        whole = await whole_stream(one.http, "/v1/completions")
    assert without_names([f"data: {each}" for each in told]) == without_names(whole)
    assert len(sent) > 3


NAMED = st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.sampled_from([None, "stop", "length"]))


@given(st.lists(NAMED, max_size=40), st.integers(0, 40), st.integers(0, 10**6), st.binary(max_size=40))
def test_a_position_is_of_its_tokens_alone(
    tokens: list[tuple[int, int, None]], unknown: int, events: int, answer: bytes
) -> None:
    newest = tokens[-unknown:] if unknown else []
    text = told(b"s", answer, Trace(tokens), events, len(tokens), newest)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", text)
    position = read(text)
    assert position is not None
    assert (position.events, position.tokens, list(position.newest)) == (events, len(tokens), list(map(tuple, newest)))
    assert is_of(position, b"s", answer, Trace(tokens))
    assert not is_of(position, b"t", answer, Trace(tokens))
    assert not is_of(position, b"s", answer + b"x", Trace(tokens))
    assert not is_of(position, b"s", answer, Trace([*tokens, (0, 1, None)]))


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("latin-1")))
def test_whatever_a_client_sends_is_a_position_or_none(text: str) -> None:
    read(text)


def test_an_id_is_bounded() -> None:
    tokens = [(0, 2**31, None)] * MOST_NAMED
    assert len(told(b"s", b"a", Trace(tokens), 2**40, 2**40, tokens)) <= LONGEST_ID
    more = told(b"s", b"a", Trace(tokens), 1, 2**20, tokens * 2)
    assert (position := read(more)) is not None
    assert position.newest == ()


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12))
def test_what_is_heard_twice_is_kept_once(gateway_heard: list[tuple[int, int]]) -> None:
    """A connection that breaks is followed by all anew: what is told may overlap in any way that leaves no hole."""
    birth = Birth("n", 1, 0.0)
    sent = Record(b"k", b"b", birth, 1, "a")
    for index in range(12):
        sent.add(0, TokenEvent("", index, index, 0.0, [], None))
    keeper = Keeper.__new__(Keeper)
    keeper._records, keeper._size, keeper._clock = {}, 0, lambda: 0.0
    keeper.hear(Begun(b"k", b"b", birth, 1, 0), "a")
    (got,) = keeper._records.values()
    for first, last in [*gateway_heard, (0, 12)]:
        keeper.hear(Grown(b"k", min(first, len(got.entries)), sent.entries[min(first, len(got.entries)) : last]), "a")
        assert got.entries == sent.entries[: len(got.entries)]
    assert got.entries == sent.entries
    assert keeper.size == got.size


async def test_what_another_gateway_tells_of_a_foreign_answer_changes_nothing(
    gateway: Harness, leader: FakeLeader
) -> None:
    """A gateway that was cut off goes on telling of what another has taken over."""
    keeper = gateway.gateway.keeper
    birth = Birth("n", 1, 0.0)
    keeper.hear(Begun(b"k", b"b", birth, 1, 0), "a")
    keeper.hear(Begun(b"k", b"b", birth, 1, 1), "b")
    entry = Record(b"", b"", birth, 1, "").add(0, TokenEvent("", 0, 7, 0.0, [], None))
    assert entry is not None
    keeper.hear(Grown(b"k", 0, [entry]), "a")
    keeper.hear(Begun(b"k", b"b", birth, 1, 0), "a")
    (record,) = keeper._records.values()
    assert (record.owner, record.entries) == ("b", [])
    assert keeper.birth(Wish(b"k", b"b")) == birth


async def test_an_answer_that_is_asked_for_anew_takes_the_place_of_one_that_is_done(gateway: Harness) -> None:
    """The other gateway had forgotten it."""
    keeper = gateway.gateway.keeper
    keeper.hear(Begun(b"k", b"b", Birth("old", 1, 1.0), 1, 0), "a")
    keeper.hear(Begun(b"k", b"b", Birth("new", 1, 2.0), 1, 0), "b")
    assert keeper.birth(Wish(b"k", b"b")).name == "old", "it runs"
    keeper.hear(Ended(b"k", 0), "a")
    keeper.hear(Begun(b"k", b"b", Birth("new", 1, 2.0), 1, 0), "b")
    assert keeper.birth(Wish(b"k", b"b")).name == "new"
