"""Several gateways in front of the same leaders: what one asks for never reaches the other, and the end of one is none of the other's."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, a_gateway


@pytest.fixture
async def other(tokenizer: Tokenizer, leader: FakeLeader) -> AsyncIterator[Harness]:
    """Connected to the same leader as `gateway`."""
    async with a_gateway(tokenizer) as harness:
        await harness.connect(leader)
        yield harness


async def test_each_gets_the_answers_that_it_asked_for(gateway: Harness, other: Harness, leader: FakeLeader) -> None:
    asked = [(each, f"{count} hello") for count in range(4) for each in (gateway, other)]
    answers = await asyncio.gather(*(each.complete(prompt=prompt, max_tokens=20) for each, prompt in asked))
    alone = [await gateway.complete(prompt=prompt, max_tokens=20) for _, prompt in asked]
    assert [one.json()["choices"] for one in answers] == [one.json()["choices"] for one in alone]
    assert len({submit.request for submit in leader.submits}) == 2 * len(asked)


async def test_what_the_others_ask_for_counts_as_load(gateway: Harness, other: Harness, leader: FakeLeader) -> None:
    leader.allow(0)
    running = asyncio.create_task(other.complete(max_tokens=4))
    await leader.until(lambda: leader.running)
    mine = asyncio.create_task(gateway.complete(max_tokens=4))
    await leader.until(lambda: len(leader.running) == 2)
    leader.allow(1)
    await gateway.until(lambda: gateway.dispatcher.load().running == 2)
    assert gateway.dispatcher.status().running_requests == 1
    leader.allow(None)
    await asyncio.gather(running, mine)


async def test_the_end_of_one_is_none_of_the_other(gateway: Harness, other: Harness, leader: FakeLeader) -> None:
    leader.allow(0)
    lost = asyncio.create_task(other.complete(max_tokens=8))
    mine = asyncio.create_task(gateway.complete(max_tokens=8))
    await leader.until(lambda: len(leader.running) == 2)
    await other.dispatcher.close()
    leader.allow(None)
    assert (await mine).status_code == 200
    lost.cancel()
