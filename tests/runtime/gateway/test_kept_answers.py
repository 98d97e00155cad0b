"""Answers under an Idempotency-Key: a client whose connection broke gets the rest and nothing twice, and nothing is computed twice."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.laws import share, swept
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import MODEL_NAME, Harness, a_gateway, a_leader, scripted

FOX = "the quick brown fox jumps over the lazy dog"
KEY = "5f0c1e0a-3b7e-4b7e-9d6c-1f6b8f0d2a11"
MESSAGES = [{"role": "user", "content": "hello"}]
INTERFACES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 12},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12},
    "/v1/responses": {"input": "hello", "max_output_tokens": 12},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12},
}


def body(path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, **INTERFACES[path], **fields}


class Stream:
    """A stream as a client reads it: events with their ids, until it lets go of the connection."""

    def __init__(
        self, http: httpx.AsyncClient, path: str, asked: Mapping[str, Any], headers: Mapping[str, str]
    ) -> None:
        self._response = http.stream("POST", path, json={**asked, "stream": True}, headers=headers)
        self._events: AsyncIterator[str] | None = None
        self.last_id = ""

    async def __aenter__(self) -> Self:
        response = await self._response.__aenter__()
        if response.status_code != 200:
            await response.aread()
        assert response.status_code == 200, response.text
        self._events = self._read(response)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._response.__aexit__(None, None, None)

    async def _read(self, response: httpx.Response) -> AsyncIterator[str]:
        pending = ""
        async for text in response.aiter_text():
            pending += text
            *events, pending = pending.split("\n\n")
            for event in events:
                found = re.match(r"id: (\S+)\n", event)
                self.last_id = found[1] if found else self.last_id
                yield event[found.end() :] if found else event

    async def next(self) -> str:
        assert self._events is not None
        return await anext(self._events)

    async def rest(self) -> list[str]:
        assert self._events is not None
        return [event async for event in self._events]


@pytest.fixture
async def http(gateway: Harness) -> AsyncIterator[httpx.AsyncClient]:
    """Over real connections, which break."""
    async with gateway.serving() as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client


def stream(
    http: httpx.AsyncClient, path: str = "/v1/completions", after: str = "", key: str = KEY, **fields: Any
) -> Stream:
    headers = {"Idempotency-Key": key, **({"Last-Event-ID": after} if after else {})}
    return Stream(http, path, body(path, **fields), headers)


async def whole_stream(http: httpx.AsyncClient, path: str, key: str = "the whole", **fields: Any) -> list[str]:
    async with stream(http, path, key=key, **fields) as one:
        return await one.rest()


def without_names(events: list[str]) -> list[str]:
    """What differs between two answers to the same request: names and moments."""
    return [re.sub(r'"(id|item_id|created|created_at)":("[^"]*"|\d+)', "", event) for event in events]


@pytest.mark.parametrize("path", INTERFACES)
async def test_a_stream_goes_on_behind_what_the_client_has(
    http: httpx.AsyncClient, path: str, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.model = scripted(tokenizer, FOX)  # a token is a piece
    whole = await whole_stream(http, path)
    leader.allow(5)
    async with stream(http, path) as first:
        seen = [await first.next() for _ in range(4)]
    leader.allow(None)
    async with stream(http, path, after=first.last_id) as second:
        rest = await second.rest()
    assert without_names(seen + rest) == without_names(whole)
    assert len(leader.submits) == 2, "the one that was interrupted was asked for once"
    if path == "/v1/completions":
        assert len({json.loads(event[6:])["id"] for event in (seen + rest)[:-1]}) == 1, "one answer"


def by_choice(events: list[str]) -> list[str]:
    """Which of two choices gets on first is nobody's word."""
    fields_behind = 2  # usage, and the end
    choice = re.compile(r'"choices":\[{"index":(\d+)')

    def place(event: str) -> int:
        found = choice.search(event)
        return int(found[1]) if found else fields_behind

    return sorted(without_names(events), key=place)


async def test_at_any_moment_and_any_number_of_times(
    gateway: Harness, http: httpx.AsyncClient, leader: FakeLeader
) -> None:
    fields = {"n": 2, "logprobs": 1, "seed": 3, "stream_options": {"include_usage": True}}
    whole = by_choice(await whole_stream(http, "/v1/completions", **fields))
    keys = iter(range(10**6))

    @settings(
        max_examples=share(10), deadline=None, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(cuts=st.lists(st.integers(1, len(whole) - 1), max_size=4))
    def law(cuts: list[int]) -> None:
        asyncio.run_coroutine_threadsafe(one(sorted(cuts)), loop).result()

    async def one(cuts: list[int]) -> None:
        key, seen, last = f"key {next(keys)}", [], ""
        for cut in cuts:
            async with stream(http, after=last, key=key, **fields) as part:
                while len(seen) < cut:
                    seen.append(await part.next())
                last = part.last_id or last
        async with stream(http, after=last, key=key, **fields) as part:
            assert by_choice(seen + await part.rest()) == whole

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(law)
    assert len(leader.submits) == 2 * len({submit.request[:30] for submit in leader.submits}), "each once"


async def test_without_a_key_nothing_is_kept_and_events_have_no_ids(
    gateway: Harness, http: httpx.AsyncClient, leader: FakeLeader
) -> None:
    leader.allow(3)
    async with Stream(http, "/v1/completions", body(max_tokens=100), {}) as one:
        await one.next()
    await leader.until(lambda: leader.aborts)
    assert (one.last_id, len(gateway.gateway.keeper)) == ("", 0)


async def test_a_request_that_is_sent_again_gets_the_same_answer(http: httpx.AsyncClient, leader: FakeLeader) -> None:
    answers = [
        await http.post("/v1/completions", json=body(temperature=1), headers={"Idempotency-Key": KEY}) for _ in range(3)
    ]
    assert {answer.text for answer in answers} == {answers[0].text}
    assert len(leader.submits) == 1


@pytest.mark.parametrize("gone", [True, False], ids=["the first has gone", "the first waits"])
async def test_what_runs_is_not_computed_again(
    gateway: Harness, http: httpx.AsyncClient, leader: FakeLeader, *, gone: bool
) -> None:
    leader.allow(3)
    send = lambda: asyncio.create_task(http.post("/v1/completions", json=body(), headers={"Idempotency-Key": KEY}))  # noqa: E731
    first = send()
    await gateway.until(lambda: gateway.gateway.keeper.size > 200)
    if gone:
        first.cancel()
    second = send()
    await gateway.until(lambda: any(len(each.readers) >= 2 - gone for each in gateway.gateway.keeper._records.values()))
    leader.allow(None)
    answer = (await second).json()
    assert answer["usage"]["completion_tokens"] == 12
    assert len(leader.submits) == 1
    assert gone or (await first).json() == answer


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": "another"}), ("/v1/completions", {"stream": True}), ("/v1/chat/completions", {})],
    ids=["another prompt", "another field", "another path"],
)
async def test_a_key_is_of_one_request(gateway: Harness, path: str, fields: Any) -> None:
    headers = {"Idempotency-Key": KEY}
    assert (await gateway.http.post("/v1/completions", json=body(), headers=headers)).status_code == 200
    refused = await gateway.http.post(path, json=body(path, **fields), headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")


REFUSED = {
    "an id without a key": ({"Last-Event-ID": "x"}, 400, "Idempotency-Key that it was begun with"),
    "no id of ours": ({"Idempotency-Key": KEY, "Last-Event-ID": "17"}, 400, "no id of an event"),
    "an id beyond all bounds": ({"Idempotency-Key": KEY, "Last-Event-ID": "A" * 9000}, 400, "no id of an event"),
    "an empty key": ({"Idempotency-Key": ""}, 400, "1 to 255 printable"),
    "a long key": ({"Idempotency-Key": "k" * 256}, 400, "1 to 255 printable"),
    "a key of other letters": ({"Idempotency-Key": "schlüssel"}, 400, "1 to 255 printable"),
}


@pytest.mark.parametrize(("headers", "status", "why"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_meant_is_refused(gateway: Harness, headers: Any, status: int, why: str) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = await gateway.http.post("/v1/completions", json=body(stream=True), headers=encoded)
    assert (answer.status_code, why in answer.json()["error"]["message"]) == (status, True), answer.text


async def an_id(http: httpx.AsyncClient, key: str, **fields: Any) -> str:
    async with stream(http, key=key, **fields) as one:
        await one.rest()
    return one.last_id


async def test_an_id_goes_on_with_its_own_answer_alone(http: httpx.AsyncClient) -> None:
    mine, other = await an_id(http, "mine"), await an_id(http, "other")
    cut = mine[:-2] + ("A" if mine[-2] != "A" else "B") + mine[-1]
    for wrong, code in ((other, "stream_lost"), (cut, "stream_lost")):
        headers = {"Idempotency-Key": "mine", "Last-Event-ID": wrong}
        answer = await http.post("/v1/completions", json=body(stream=True), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, code)
    headers = {"Idempotency-Key": "never asked", "Last-Event-ID": mine}
    answer = await http.post("/v1/completions", json=body(stream=True), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "stream_not_found")


async def test_the_key_of_one_tenant_is_none_of_another(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, api_keys=ApiKeys(("ours", "theirs"))) as harness:
        await harness.connect(leader)

        async def ask(who: str) -> str:
            headers = {"Idempotency-Key": KEY, "Authorization": f"Bearer {who}"}
            return str((await harness.http.post("/v1/completions", json=body(), headers=headers)).json()["id"])

        assert await ask("ours") == await ask("ours") != await ask("theirs")
        assert len(leader.submits) == 2


async def test_an_answer_that_failed_is_asked_for_again(gateway: Harness, leader: FakeLeader) -> None:
    leader.fail_at = 3
    headers = {"Idempotency-Key": KEY}
    assert (await gateway.http.post("/v1/completions", json=body(), headers=headers)).status_code == 500
    leader.fail_at = None
    assert (await gateway.http.post("/v1/completions", json=body(), headers=headers)).status_code == 200


async def test_one_choice_that_fails_ends_the_others(gateway: Harness, leader: FakeLeader) -> None:
    leader.fail_at = 3
    headers = {"Idempotency-Key": KEY}
    assert (await gateway.http.post("/v1/completions", json=body(n=4), headers=headers)).status_code == 500
    assert (gateway.dispatcher.status().running_requests, len(gateway.gateway.keeper)) == (0, 0)
    leader.fail_at = None
    assert (await gateway.complete(max_tokens=3)).status_code == 200, "and nothing else"


async def test_stop_strings_end_what_is_kept(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, FOX)
    headers = {"Idempotency-Key": KEY}
    asked = body(stop=["fox"], max_tokens=40)
    first, second = [await gateway.http.post("/v1/completions", json=asked, headers=headers) for _ in range(2)]
    assert first.json()["choices"][0]["text"] == "the quick brown "
    assert first.text == second.text
    (record,) = gateway.gateway.keeper._records.values()
    assert record.is_done


async def test_an_answer_that_nobody_comes_back_for_ends(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    limits = Limits(resume_seconds=0.05)
    leader.allow(3)
    async with (
        a_gateway(tokenizer, limits=limits) as harness,
        harness.serving() as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        await harness.connect(leader)
        async with stream(http, max_tokens=100) as one:
            await one.next()
        await leader.until(lambda: leader.aborts)
        assert len(harness.gateway.keeper) == 0
        headers = {"Idempotency-Key": KEY, "Last-Event-ID": one.last_id}
        asked = {**body(max_tokens=100), "stream": True}
        late = await http.post("/v1/completions", json=asked, headers=headers)
        assert (late.status_code, late.json()["error"]["code"]) == (410, "stream_not_found")


async def test_an_answer_that_ends_while_nobody_reads_it_is_kept(
    gateway: Harness, http: httpx.AsyncClient, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.model = scripted(tokenizer, FOX)
    leader.allow(3)
    async with stream(http) as first:
        seen = [await first.next()]
    (record,) = gateway.gateway.keeper._records.values()
    await gateway.until(lambda: not record.readers)
    assert record.ending is not None
    leader.allow(None)
    await gateway.until(lambda: record.is_done)
    assert record.ending is None, "nothing gives it up"
    async with stream(http, after=first.last_id) as second:
        seen += await second.rest()
    assert len(leader.submits) == 1
    assert seen[-1] == "data: [DONE]"


async def test_what_is_kept_is_bounded(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(max_kept_bytes=8000)) as harness:
        await harness.connect(leader)
        keeper = harness.gateway.keeper
        for number in range(12):
            headers = {"Idempotency-Key": str(number)}
            answer = await harness.http.post("/v1/completions", json=body(max_tokens=20), headers=headers)
            assert answer.status_code == 200
            assert keeper.size <= 8000
        assert 1 < len(keeper) < 12
        before = len(leader.submits)
        for number, again in ((11, 0), (0, 1)):
            headers = {"Idempotency-Key": str(number)}
            await harness.http.post("/v1/completions", json=body(max_tokens=20), headers=headers)
            assert len(leader.submits) - before == again, "the newest are kept"


async def test_while_what_runs_fills_the_bound_no_more_is_taken(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(max_kept_bytes=1000)) as harness:
        await harness.connect(leader)
        leader.allow(30)
        headers = {"Idempotency-Key": KEY}
        running = asyncio.create_task(harness.http.post("/v1/completions", json=body(max_tokens=40), headers=headers))
        await harness.until(lambda: harness.gateway.keeper.size > 1000)
        other = await harness.http.post("/v1/completions", json=body(), headers={"Idempotency-Key": "other"})
        assert (other.status_code, other.json()["error"]["code"]) == (429, "queue_full")
        leader.allow(None)
        assert (await running).status_code == 200


async def test_answers_are_forgotten_in_time(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(keep_seconds=0.0)) as harness:
        await harness.connect(leader)
        keeper = harness.gateway.keeper
        await harness.http.post("/v1/completions", json=body(), headers={"Idempotency-Key": KEY})
        keeper.forget_old()
        assert (len(keeper), keeper.size) == (0, 0)


@pytest.mark.parametrize("path", swept([*INTERFACES], ["/v1/chat/completions"]))
async def test_calls_keep_their_names(tools_model: Tokenizer, path: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"name": "add", "description": "a sum", "parameters": {"type": "object"}}
    tools = {
        "/v1/chat/completions": [{"type": "function", "function": tool}],
        "/v1/responses": [{"type": "function", **tool}],
        "/v1/messages": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    if path not in tools:
        return
    limit = {"max_output_tokens": 100} if path == "/v1/responses" else {"max_tokens": 100}
    async with a_leader(scripted(tools_model, call)) as leader, a_gateway(tools_model) as harness:
        await harness.connect(leader)
        asked = body(path, tools=tools[path], **limit)
        answers = [await harness.http.post(path, json=asked, headers={"Idempotency-Key": KEY}) for _ in range(2)]
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].text == answers[1].text
    assert "add" in answers[0].text


async def test_a_new_epoch_and_a_broken_connection_together(
    gateway: Harness, http: httpx.AsyncClient, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.model = scripted(tokenizer, FOX)
    whole = without_names(await whole_stream(http, "/v1/completions"))
    leader.allow(4)
    async with stream(http) as first:
        seen = [await first.next() for _ in range(3)]
    await leader.stop()
    async with a_leader(leader.model, epoch=2) as successor:
        await gateway.connect(successor)
        async with stream(http, after=first.last_id) as second:
            seen += await second.rest()
        assert without_names(seen) == whole
        assert len(successor.submits[0].delivered) >= 3
    await leader.start()
