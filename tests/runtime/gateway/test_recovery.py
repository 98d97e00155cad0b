"""Leaders that come, go, and come back: clients see one uninterrupted answer, or a clear refusal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from openai import AsyncOpenAI, AsyncStream
from openai.types import Completion

from strata_planner.contract.control import Leader, SetRoute
from strata_planner.contract.frames import Sampling
from strata_runtime.errors import InputError
from strata_runtime.gateway.routing import dispatcher as dispatcher_module
from strata_runtime.gateway.routing.journal import ATTEMPT, GenerationRequest
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader, route_to
from tests.runtime.gateway.harness import Harness, a_gateway, a_leader, endless

PROMPT = [5, 6, 7]
ANSWER = 40
BEFORE = 12  # tokens until something happens


@pytest.fixture
async def client(gateway: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with gateway.serving() as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(leader: FakeLeader, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([leader.model(PROMPT, index) for index in range(ANSWER)])


async def start(client: AsyncOpenAI) -> AsyncStream[Completion]:
    return await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=ANSWER, stream=True)


async def text_of(stream: AsyncStream[Completion]) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_a_killed_leader_that_comes_back_goes_on(
    gateway: Harness, client: AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.allow(BEFORE)
    stream = await start(client)
    first = (await anext(stream)).choices[0].text
    await leader.stop()
    await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 0)
    assert (await gateway.http.get("/health")).status_code == 503
    leader.allow(None)
    await leader.start()
    assert first + await text_of(stream) == expected(leader, tokenizer)
    replayed = leader.submits[-1]
    assert 0 < len(replayed.delivered) <= BEFORE
    assert replayed.delivered == [leader.model(PROMPT, index) for index in range(len(replayed.delivered))]
    assert await gateway.metric("strata_replays_total") == 1


async def test_a_new_epoch_leaves_the_requests_of_a_replica_that_goes_on_where_they_are(
    gateway: Harness, client: AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    """Of two streams the one at the replica that is formed anew is replayed; the other's leader hears nothing of it."""
    async with a_leader(leader.model, epoch=3) as here, a_leader(leader.model, replica=1, epoch=3) as other:
        gateway.dispatcher.set_route(route_to(here, other))
        await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 2)
        here.allow(BEFORE)
        other.allow(BEFORE)
        streams = [await start(client) for _ in range(2)]
        begun = [(await anext(stream)).choices[0].text for stream in streams]
        assert (len(here.submits), len(other.submits)) == (1, 1)
        async with a_leader(leader.model, replica=1, epoch=4, key="another key") as successor:
            goes_on = msgspec.structs.replace(here.leader(), formed=3, key=here.key)
            gateway.dispatcher.set_route(SetRoute(4, successor.key, (goes_on, successor.leader()), 512))
            await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 2)
            here.allow(None)
            texts = [text + await text_of(stream) for text, stream in zip(begun, streams, strict=True)]
        assert texts == [expected(leader, tokenizer)] * 2
        assert [submit.delivered for submit in here.submits if not submit.delivered] == [[]]
        assert here.aborts == []
        assert await gateway.metric("strata_replays_total") == 1


async def test_a_replica_that_serves_an_epoch_later_than_others_joins_them(
    gateway: Harness, client: AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    """Who was there before notices nothing, whatever else is said of it; a route with another key is none of this epoch."""
    async with a_leader(leader.model, epoch=3) as here, a_leader(leader.model, replica=1, epoch=3) as other:
        gateway.dispatcher.set_route(route_to(here))
        await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 1)
        here.allow(BEFORE)
        stream = await start(client)
        begun = (await anext(stream)).choices[0].text
        route = route_to(here, other)
        gateway.dispatcher.set_route(msgspec.structs.replace(route, key="another"))
        assert gateway.dispatcher.status().replicas == (0,)
        moved = msgspec.structs.replace(here.leader(), endpoint="tcp://127.0.0.1:1")
        gateway.dispatcher.set_route(msgspec.structs.replace(route, leaders=(moved, other.leader())))
        for _ in range(2):  # a route that is as known, or that knows less, changes nothing
            gateway.dispatcher.set_route(route_to(here))
        await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 2)
        assert gateway.dispatcher.status().replicas == (0, 1)
        assert await text_of(await start(client)) == expected(leader, tokenizer)
        here.allow(None)
        assert begun + await text_of(stream) == expected(leader, tokenizer)
        assert (len(here.submits), len(other.submits)) == (1, 1)


async def test_a_gateway_that_was_started_anew_hears_replicas_that_went_on(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    """Its first route is of an epoch that they were not formed in; so is its second."""
    async with a_leader(leader.model, epoch=3) as here:
        for epoch in (5, 6):
            goes_on = msgspec.structs.replace(here.leader(), formed=3, key=here.key)
            gateway.dispatcher.set_route(SetRoute(epoch, "another key", (goes_on,), 512))
            await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 1)
            answer = await asyncio.wait_for(gateway.complete(max_tokens=3), 10)
            assert answer.status_code == 200


async def test_a_replica_formed_anew_at_the_same_place_is_another(gateway: Harness, leader: FakeLeader) -> None:
    """A leader that still says the old epoch is no leader of the new one."""
    async with a_leader(leader.model, epoch=2) as here:
        gateway.dispatcher.set_route(route_to(here))
        await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 1)
        gateway.dispatcher.set_route(SetRoute(3, here.key, (here.leader(),), 512))
        assert gateway.dispatcher.status().leaders_connected == 0
        here.epoch = 3
        await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 1)


async def test_a_new_epoch_replays_at_its_leaders(
    gateway: Harness, client: AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.allow(BEFORE)
    stream = await start(client)
    first = (await anext(stream)).choices[0].text
    async with a_leader(leader.model, epoch=2, key="another key") as successor:
        gateway.dispatcher.set_route(route_to(successor))
        leader.allow(None)  # a zombie of the old epoch: nobody listens to it
        assert first + await text_of(stream) == expected(leader, tokenizer)
        assert len(successor.submits) == 1
    assert gateway.dispatcher.status().epoch == 2


async def test_whose_client_waits_longest_is_replayed_first(gateway: Harness, leader: FakeLeader) -> None:
    leader.allow(0)
    running = asyncio.create_task(gateway.complete(n=3, max_tokens=3))
    await leader.until(lambda: len(leader.submits) == 3)
    names = [submit.request for submit in leader.submits]
    for name, last in zip(names, (3.0, 1.0, 2.0), strict=True):
        gateway.dispatcher._answers[name].last_at = last
    async with a_leader(leader.model, epoch=2, key="another key") as successor:
        gateway.dispatcher.set_route(route_to(successor))
        assert (await running).status_code == 200
    assert [submit.request.partition(ATTEMPT)[0] for submit in successor.submits] == [names[1], names[2], names[0]]


async def test_a_new_incarnation_has_forgotten_its_requests(
    gateway: Harness, client: AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    """The process behind a connection that never broke says another name: as a proxy in between could do."""
    leader.allow(BEFORE)
    stream = await start(client)
    first = (await anext(stream)).choices[0].text
    leader.incarnation += 1
    leader._running.clear()
    leader.allow(None)
    assert first + await text_of(stream) == expected(leader, tokenizer)
    assert len(leader.submits) == 2


async def test_another_replica_takes_over(gateway: Harness, tokenizer: Tokenizer) -> None:
    async with (
        a_leader(endless(tokenizer), epoch=2) as one,
        a_leader(endless(tokenizer), epoch=2, replica=1) as two,
        gateway.serving() as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await gateway.connect(one, two)
        one.allow(BEFORE)
        stream = await start(client)
        first = (await anext(stream)).choices[0].text
        assert not two.submits
        await one.stop()
        assert first + await text_of(stream) == expected(one, tokenizer)
        assert len(two.submits) == 1
        await one.start()
        await one.until(lambda: one.aborts == [one.submits[0].request])  # in case it still had it


async def test_what_is_new_goes_to_whole_replicas_and_what_runs_stays(gateway: Harness, tokenizer: Tokenizer) -> None:
    """A leader that has lost a later stage answers as before: it says so, and keeps what it has."""
    async with (
        a_leader(endless(tokenizer), epoch=2) as one,
        a_leader(endless(tokenizer), epoch=2, replica=1) as two,
    ):
        await gateway.connect(one, two)
        one.allow(0)
        running = asyncio.create_task(gateway.complete(max_tokens=3))
        await one.until(lambda: one.submits)
        one.lost = "slot-9"
        await gateway.until(lambda: any(hello.lost for hello in gateway.dispatcher._hellos()))
        assert (await gateway.complete(n=8)).status_code == 200
        assert (len(one.submits), len(two.submits)) == (1, 8)
        assert one.running == [one.submits[0].request]
        two.lost = "slot-8"
        two.allow(0)
        await gateway.until(lambda: all(hello.lost for hello in gateway.dispatcher._hellos()))
        waiting = asyncio.create_task(gateway.complete(n=3, max_tokens=3))
        await two.until(lambda: len(one.submits) + len(two.submits) == 12)  # none is whole: they wait where least do
        async with a_leader(one.model, epoch=3, key="another key") as mended:
            gateway.dispatcher.set_route(route_to(mended))
            assert [(await each).status_code for each in (running, waiting)] == [200, 200]
            assert len(mended.submits) == 4


async def test_requests_spread_over_replicas(gateway: Harness, tokenizer: Tokenizer) -> None:
    async with (
        a_leader(endless(tokenizer), epoch=2) as one,
        a_leader(endless(tokenizer), epoch=2, replica=1) as two,
    ):
        await gateway.connect(one, two)
        assert (await gateway.complete(n=8)).status_code == 200
        assert (len(one.submits), len(two.submits)) == (4, 4)


async def test_lost_tokens_send_the_leader_back(
    gateway: Harness, client: AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.allow(BEFORE)
    stream = await start(client)
    first = (await anext(stream)).choices[0].text
    leader._running[leader.running[0]].produced += 3
    leader.allow(None)
    assert first + await text_of(stream) == expected(leader, tokenizer)
    assert leader.aborts[0] == leader.submits[0].request


async def test_requests_wait_for_a_leader(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer) as gateway:
        await leader.stop()
        gateway.dispatcher.set_route(route_to(leader))
        waiting = asyncio.create_task(gateway.complete(max_tokens=3))
        await gateway.until(lambda: gateway.dispatcher.status().running_requests == 1)
        assert await gateway.metric("vllm:num_requests_waiting") == 1
        await leader.start()
        assert (await waiting).json()["usage"]["completion_tokens"] == 3


async def test_but_not_for_ever(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(hold_seconds=0.01)) as gateway:
        await leader.stop()
        gateway.dispatcher.set_route(route_to(leader))
        response = await gateway.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert "--hold-seconds" in response.json()["error"]["message"]
        assert gateway.dispatcher.status().running_requests == 0
        await leader.start()


async def test_without_a_route(tokenizer: Tokenizer) -> None:
    async with a_gateway(tokenizer) as gateway:
        response = await gateway.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        health = await gateway.http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "no controller has set a route yet")


async def test_a_zombie_without_the_key_is_never_heard(tokenizer: Tokenizer) -> None:
    async with (
        a_leader(endless(tokenizer), key="the old key") as zombie,
        a_gateway(tokenizer, limits=Limits(hold_seconds=0.3)) as gateway,
    ):
        gateway.dispatcher.set_route(msgspec.structs.replace(route_to(zombie), key="the new key"))
        assert (await gateway.complete()).status_code == 503
        assert zombie.submits == []


async def test_a_leader_of_another_epoch_gets_nothing(tokenizer: Tokenizer) -> None:
    async with (
        a_leader(endless(tokenizer), epoch=1) as behind,
        a_gateway(tokenizer) as gateway,
    ):
        gateway.dispatcher.set_route(msgspec.structs.replace(route_to(behind), epoch=2))
        waiting = asyncio.create_task(gateway.complete(max_tokens=1))
        behind.epoch = 2  # it commits
        assert (await waiting).status_code == 200


async def test_routes_only_go_forward(gateway: Harness, leader: FakeLeader) -> None:
    route = route_to(leader)
    for other in (route, msgspec.structs.replace(route, epoch=0), msgspec.structs.replace(route, max_model_len=1)):
        gateway.dispatcher.set_route(other)
        assert (gateway.dispatcher.status().epoch, gateway.dispatcher.max_tokens()) == (1, 512)
        assert gateway.dispatcher.status().leaders_connected == 1


async def test_an_endpoint_that_is_none_leaves_the_route_in_force(gateway: Harness, leader: FakeLeader) -> None:
    nowhere = Leader(0, "slot-0", "nowhere", 1.0)
    with pytest.raises(InputError, match=r"nowhere.*tcp://host:port"):
        gateway.dispatcher.set_route(msgspec.structs.replace(route_to(leader), epoch=2, leaders=(nowhere,)))
    assert (await gateway.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(gateway: Harness, leader: FakeLeader, *, stream: bool) -> None:
    leader.allow(BEFORE)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": ANSWER, "stream": stream}
    async with gateway.serving() as url:
        host, _, port = url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        data = msgspec.json.encode(body)
        headers = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + headers + data)
        await leader.until(lambda: leader.submits)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await leader.until(lambda: leader.aborts == [leader.submits[0].request])
        await gateway.until(lambda: gateway.dispatcher.status().running_requests == 0)


async def test_draining_lets_answers_end_and_takes_no_new_ones(
    gateway: Harness, client: AsyncOpenAI, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.allow(BEFORE)
    stream = await start(client)
    draining = asyncio.create_task(gateway.dispatcher.drain())
    await asyncio.sleep(0)
    assert (await gateway.complete()).status_code == 503
    leader.allow(None)
    assert await text_of(stream) == expected(leader, tokenizer)
    await draining


async def test_draining_aborts_what_takes_too_long(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(drain_seconds=0.01)) as gateway:
        await gateway.connect(leader)
        leader.allow(BEFORE)
        running = asyncio.create_task(gateway.complete(max_tokens=ANSWER))
        await leader.until(lambda: leader.submits)
        await gateway.dispatcher.drain()
        assert (await running).status_code == 503
        await leader.until(lambda: leader.aborts)


async def test_replays_of_an_epoch_are_shared_out_as_new_requests_are(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leaders say hello one after the other: the first does not get all."""
    monkeypatch.setattr(dispatcher_module, "GATHER_SECONDS", 60.0)
    leader.allow(0)
    running = asyncio.create_task(gateway.complete(n=20, max_tokens=3))
    await leader.until(lambda: len(leader.submits) == 20)
    async with a_leader(endless(tokenizer), epoch=2) as one, a_leader(endless(tokenizer), epoch=2, replica=1) as two:
        await two.stop()
        gateway.dispatcher.set_route(route_to(one, two))
        await gateway.until(lambda: gateway.dispatcher.status().leaders_connected == 1)
        health = (await gateway.http.get("/health")).json()
        assert (health["leaders_connected"], health["leaders_missing"]) == (1, 1)
        await two.start()
        assert (await running).status_code == 200
        assert (len(one.submits), len(two.submits)) == (10, 10)


async def test_replays_do_not_wait_for_a_leader_that_never_comes(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "GATHER_SECONDS", 0.05)
    leader.allow(0)
    running = asyncio.create_task(gateway.complete(n=3, max_tokens=3))
    await leader.until(lambda: len(leader.submits) == 3)
    async with a_leader(endless(tokenizer), epoch=2) as one, a_leader(endless(tokenizer), epoch=2, replica=1) as two:
        await two.stop()
        gateway.dispatcher.set_route(route_to(one, two))
        assert (await running).status_code == 200
        assert len(one.submits) == 3
        await two.start()


async def test_what_cannot_be_sent_never_enters_the_journal(gateway: Harness) -> None:
    request = GenerationRequest("r", (2**70,), 5, (), Sampling())
    with pytest.raises(OverflowError):
        gateway.dispatcher.open([request])
    assert gateway.dispatcher.status().running_requests == 0


async def test_a_replay_that_fails_ends_that_request_alone(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.allow(1)
    running = [asyncio.create_task(gateway.complete(max_tokens=5)) for _ in range(3)]
    await leader.until(lambda: len(leader.submits) == 3)
    broken = gateway.dispatcher._journal._entries[leader.submits[0].request]
    broken.delivered = [2**70]
    async with a_leader(endless(tokenizer), epoch=2) as one:
        gateway.dispatcher.set_route(route_to(one))
        assert sorted([(await task).status_code for task in running]) == [200, 200, 500]
        assert (await gateway.complete(max_tokens=2)).status_code == 200
        assert (await gateway.http.get("/health")).json()["leaders_missing"] == 0
