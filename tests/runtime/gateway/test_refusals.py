"""What bad requests get: OpenAI's error shape with the value, the rule and the fix."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.http.parameters import HARMLESS, UNSUPPORTED
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, a_gateway
from tests.runtime.gateway.models import write_model_folder

JSON = {"Content-Type": "application/json"}
USED = {  # for each unsupported parameter a value that asks for something
    "audio": {"voice": "alloy", "format": "wav"},
    "bad_words": ["x"],
    "best_of": 2,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_json": {},
    "logit_bias": {"5": 1},
    "min_p": 0.1,
    "min_tokens": 1,
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": -1,
    "prompt_logprobs": 1,
    "reasoning_effort": "low",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "skip_special_tokens": False,
    "structured_outputs": {},
    "suffix": "end",
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
async def test_unsupported_parameters_are_refused_by_name(standing: Harness, name: str) -> None:
    response = await standing.chat(**{name: USED[name]})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert error["message"].startswith(f"{name}=")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
async def test_they_may_be_sent_unused(standing: Harness, name: str) -> None:
    for neutral in (*UNSUPPORTED[name], None):
        assert (await standing.chat(**{name: neutral}, max_tokens=1)).status_code == 200


async def test_harmless_parameters_are_accepted(gateway: Harness) -> None:
    assert (await gateway.chat(**dict.fromkeys(HARMLESS, "x"), max_tokens=1)).status_code == 200


COMPLETION = {"model": "tiny", "prompt": "hello"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        pytest.param("completions", b"{", None, "not valid JSON", id="broken JSON"),
        pytest.param("completions", b"[]", None, "send a JSON object", id="no object"),
        pytest.param("completions", b'{"model": NaN}', None, "byte 10", id="not a number"),
        pytest.param("completions", b"[" * 100_000, None, "send a JSON object", id="deep"),
        pytest.param("completions", b'{"model": ' + b"[" * 100_000, None, "not valid JSON", id="deep within"),
        pytest.param(
            "completions", b'{"model": "tiny", "prompt": "\\ud800 of text"}', None, "hex escape", id="half character"
        ),
        pytest.param("completions", b'{"model": "tiny", "prompt": "\xff"}', "prompt", "UTF-8", id="no UTF-8"),
        pytest.param("completions", {"prompt": "x"}, "model", "required", id="no model"),
        pytest.param("completions", {"model": "tiny"}, "prompt", "required", id="no prompt"),
        pytest.param("completions", COMPLETION | {"prompt": ""}, "prompt", "no token", id="empty prompt"),
        pytest.param("completions", COMPLETION | {"prompt": []}, "prompt", "no prompt", id="no prompts"),
        pytest.param("completions", COMPLETION | {"prompt": [[]]}, "prompt", "no token", id="empty token list"),
        pytest.param(
            "completions", COMPLETION | {"prompt": [[5], 5]}, "prompt.1", "list of such lists", id="two kinds"
        ),
        pytest.param("completions", COMPLETION | {"prompt": [10**6]}, "prompt", "vocabulary ends", id="token id"),
        pytest.param(
            "completions", COMPLETION | {"prompt": [1, "a"]}, "prompt.1", "list of token ids", id="mixed prompt"
        ),
        pytest.param("completions", COMPLETION | {"prompt": [5, -1]}, "prompt.1", ">= 0", id="negative id"),
        pytest.param("completions", COMPLETION | {"prompt": [1.5]}, "prompt.0", "got `float`", id="half an id"),
        pytest.param("completions", COMPLETION | {"prompt": [2**70]}, "prompt.0", "<= 2147483647", id="huge id"),
        pytest.param("completions", COMPLETION | {"top_k": 2**64}, "top_k", "<= 2147483647", id="huge top_k"),
        pytest.param("completions", COMPLETION | {"top_k": 10**6}, "top_k", "or 0 for all", id="large top_k"),
        pytest.param(
            "completions", COMPLETION | {"stop_token_ids": [2**64]}, "stop_token_ids.0", "<= ", id="huge stop"
        ),
        pytest.param(
            "completions", COMPLETION | {"stop_token_ids": [10**6]}, "stop_token_ids", "ends at", id="stop id"
        ),
        pytest.param("completions", COMPLETION | {"stop_token_ids": [1] * 129}, "stop_token_ids", "<= 128", id="stops"),
        pytest.param("completions", COMPLETION | {"seed": 2**63}, "seed", "<= 9223372036854775807", id="huge seed"),
        pytest.param("completions", COMPLETION | {"max_tokens": 2**64}, "max_tokens", "<= ", id="huge max_tokens"),
        pytest.param("completions", COMPLETION | {"prompt": {"a": 1}}, "prompt", "prompt", id="prompt object"),
        pytest.param("completions", COMPLETION | {"temprature": 1}, "temprature", "spelling", id="unknown name"),
        pytest.param("completions", COMPLETION | {"temperature": 3}, "temperature", "<= 2.0", id="hot"),
        pytest.param("completions", COMPLETION | {"temperature": "1"}, "temperature", '"1"', id="text for a number"),
        pytest.param("completions", COMPLETION | {"top_p": 0}, "top_p", "> 0.0", id="top_p"),
        pytest.param("completions", COMPLETION | {"n": 0}, "n", ">= 1", id="n"),
        pytest.param("completions", COMPLETION | {"max_tokens": 0}, "max_tokens", ">= 1", id="max_tokens 0"),
        pytest.param("completions", COMPLETION | {"max_tokens": 1.5}, "max_tokens", "1.5", id="half a token"),
        pytest.param("completions", COMPLETION | {"stop": [""]}, "stop.0", ">= 1", id="empty stop"),
        pytest.param("completions", COMPLETION | {"stop": ["x"] * 17}, "stop", "<= 16", id="many stops"),
        pytest.param("completions", COMPLETION | {"logprobs": 21}, "logprobs", "<= 20", id="logprobs"),
        pytest.param(
            "completions", COMPLETION | {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "one of them", id="-"
        ),
        pytest.param("completions", COMPLETION | {"prompt_logprobs": 21}, "prompt_logprobs", "<= 20", id="many"),
        pytest.param("completions", COMPLETION | {"messages": []}, "messages", "not a parameter", id="chat's name"),
        pytest.param(
            "completions", COMPLETION | {"stream_options": {}}, "stream_options", "stream=true", id="stream_options"
        ),
        pytest.param("chat/completions", CHAT | {"messages": []}, "messages", "at least 1", id="no messages"),
        pytest.param("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs", "logprobs=true", id="top only"),
        pytest.param(
            "chat/completions", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of", id="both"
        ),
        pytest.param(
            "chat/completions",
            CHAT | {"messages": [{"role": "function", "content": "x"}]},
            "messages.0.role",
            "'system'",
            id="old role",
        ),
        pytest.param(
            "chat/completions",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "'text'",
            id="image",
        ),
        pytest.param(
            "chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "messages",
            "system comes first",
            id="the template refuses",
        ),
        pytest.param(
            "chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "messages.0.tool_calls",
            "not a parameter",
            id="tool calls",
        ),
        pytest.param(
            "chat/completions", CHAT | {"messages": [{"role": "user"}]}, "messages.0.content", "required", id="-"
        ),
        pytest.param("chat/completions", CHAT | {"messages": [5]}, "messages.0", "got `int`", id="no message"),
        pytest.param("chat/completions", CHAT | {"messages": "hello"}, "messages", "got `str`", id="text for messages"),
        pytest.param(
            "chat/completions", CHAT | {"tool_choice": "auto"}, "tool_choice", "needs tools", id="tools of none"
        ),
    ],
)
async def test_bad_bodies(standing: Harness, path: str, body: Any, param: str | None, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await standing.http.post(f"/v1/{path}", content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        pytest.param({"prompt": [5] * 512}, "prompt", "512 tokens, this deployment takes at most 512", id="prompt"),
        pytest.param({"prompt": [5] * 500, "max_tokens": 13}, "max_tokens", "max_tokens=12 or less", id="together"),
    ],
)
async def test_too_many_tokens(gateway: Harness, body: dict[str, Any], param: str, words: str) -> None:
    response = await gateway.complete(**body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert words in error["message"]


async def test_a_leaders_smaller_limit_counts(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    leader.max_tokens = 100
    async with a_gateway(tokenizer) as gateway:
        await gateway.connect(leader)
        assert "at most 100" in (await gateway.complete(max_tokens=100)).json()["error"]["message"]


async def test_a_leaders_own_refusal_reaches_the_client(gateway: Harness, leader: FakeLeader) -> None:
    leader.reject = "needs 7 pages, the pool has 6: shorten the prompt"
    response = await gateway.complete()
    assert response.status_code == 400
    assert response.json()["error"]["message"] == leader.reject


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_pipeline_is_a_server_error(gateway: Harness, leader: FakeLeader, *, stream: bool) -> None:
    leader.fail_at = 0
    response = await gateway.complete(stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_where_nothing_can_be_drawn_the_request_is_to_blame(
    gateway: Harness, leader: FakeLeader, *, stream: bool
) -> None:
    """Clients send again what a server has failed at: here it would come to the same."""
    leader.fail_at, leader.fails_with = 0, "never"
    response = await gateway.complete(stream=stream)
    assert response.status_code == 400
    assert "no token can follow here" in response.json()["error"]["message"]


async def test_a_failure_in_mid_stream_is_an_error_event(gateway: Harness, leader: FakeLeader) -> None:
    leader.fail_at = 3
    response = await gateway.complete(stream=True)
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/other", 404)],
)
async def test_unknown_paths(standing: Harness, method: str, path: str, status: int) -> None:
    response = await standing.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_unknown_model(gateway: Harness) -> None:
    response = await gateway.complete(model="gpt-4")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "'tiny'" in response.json()["error"]["message"]


async def test_a_model_without_a_chat_template(tmp_path: Path, leader: FakeLeader) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path, chat_template=None))
    async with a_gateway(tokenizer) as gateway:
        await gateway.connect(leader)
        response = await gateway.chat()
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]


@pytest.fixture
async def guarded(tokenizer: Tokenizer, leader: FakeLeader) -> AsyncIterator[Harness]:
    async with a_gateway(tokenizer, api_keys=ApiKeys(("first", "second"))) as gateway:
        await gateway.connect(leader)
        yield gateway


@pytest.mark.parametrize(
    ("header", "status"),
    [
        pytest.param({"Authorization": "Bearer second"}, 200, id="valid"),
        pytest.param({"Authorization": "Bearer third"}, 401, id="wrong"),
        pytest.param({"Authorization": "Basic second"}, 401, id="other scheme"),
        pytest.param({"Authorization": "Bearer "}, 401, id="empty"),
        pytest.param({}, 401, id="none"),
    ],
)
async def test_api_keys(guarded: Harness, header: dict[str, str], status: int) -> None:
    guarded.http.headers.update(header)
    for response in (
        await guarded.complete(max_tokens=1),
        await guarded.chat(max_tokens=1),
        await guarded.http.get("/v1/models"),
    ):
        assert response.status_code == status
        assert "third" not in response.text
    assert (await guarded.http.get("/health")).status_code == 200


async def test_the_bound_on_requests(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(max_requests=2)) as gateway:
        await gateway.connect(leader)
        assert (await gateway.complete(n=3)).status_code == 400
        leader.allow(0)
        running = asyncio.create_task(gateway.complete(n=2))
        await gateway.until(lambda: gateway.dispatcher.status().running_requests == 2)
        refused = await gateway.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"]
        leader.allow(None)
        assert (await running).status_code == 200


async def test_the_bound_on_tokens_of_prompts(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    async with a_gateway(tokenizer, limits=Limits(max_prompt_tokens=8)) as gateway:
        await gateway.connect(leader)
        assert (await gateway.complete(prompt=[5] * 9)).status_code == 200  # nothing else runs
        leader.allow(0)
        running = asyncio.create_task(gateway.complete(prompt=[5] * 3, n=2))
        await gateway.until(lambda: gateway.dispatcher.status().running_requests == 2)
        refused = await gateway.complete(prompt=[5] * 3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "6 tokens of prompts are running" in refused.json()["error"]["message"]
        leader.allow(None)
        assert (await running).status_code == 200
        assert (await gateway.complete(prompt=[5] * 3)).status_code == 200


async def test_a_body_that_is_too_large(tokenizer: Tokenizer) -> None:
    async with a_gateway(tokenizer, limits=Limits(max_body_bytes=100)) as gateway:
        response = await gateway.complete(prompt="x" * 100)
        assert (response.status_code, response.json()["error"]["type"]) == (413, "invalid_request_error")


async def test_bodies_that_add_up(tokenizer: Tokenizer, leader: FakeLeader) -> None:
    """Slow clients send all but the end of their bodies: what they may hold together is bounded, and given back."""
    body = json.dumps({"model": "tiny", "prompt": "hello"}).encode().ljust(600)
    end = asyncio.Event()
    waiting = asyncio.Semaphore(0)

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:-1]
        waiting.release()
        await end.wait()
        yield body[-1:]

    async with a_gateway(tokenizer, limits=Limits(max_body_bytes=600, max_held_body_bytes=1500)) as gateway:
        await gateway.connect(leader)

        def post(content: bytes | AsyncIterator[bytes]) -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(gateway.http.post("/v1/completions", content=content, headers=JSON))

        slow = [post(slowly()) for _ in range(2)]
        for _ in slow:
            await waiting.acquire()
        refused = await post(body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "hold 1198 bytes, 600 more are above the 1500 of all together" in refused.json()["error"]["message"]
        assert (await post(body.rstrip())).status_code == 200
        end.set()
        assert [(await one).status_code for one in slow] == [200, 200]
        leader.allow(0)
        running = []
        for count in range(1, 5):  # what was read holds nothing while it is answered
            running.append(post(body))
            await gateway.until(lambda: gateway.dispatcher.status().running_requests == count)  # noqa: B023
        leader.allow(None)
        assert [(await one).status_code for one in running] == [200] * len(running)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/plain; a=application/json"]
)
async def test_bodies_that_a_page_of_another_site_may_post(standing: Harness, kind: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
    headers = {"Origin": "http://elsewhere.example", "Content-Type": kind}
    response = await standing.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 415
    assert f"{kind!r} is not JSON's: send `Content-Type: application/json`" in response.json()["error"]["message"]


async def test_json_with_a_charset(gateway: Harness) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = await gateway.http.post("/v1/completions", content=b'{"model": "x", "prompt": "a"}', headers=headers)
    assert response.status_code == 404


@pytest.mark.parametrize("place", ["model", "name", "path", "prompt", "role", "type"])
async def test_errors_repeat_only_as_much_as_a_person_reads(gateway: Harness, place: str) -> None:
    long = "m" * 50_000
    match place:
        case "path":
            response = await gateway.http.get(f"/{long}")
        case "role" | "type":
            content: Any = "a" if place == "role" else [{"type": long}]
            role = long if place == "role" else "user"
            response = await gateway.chat(messages=[{"role": role, "content": content}])
        case "name":
            response = await gateway.complete(**{long: 1})
        case _:
            response = await gateway.complete(**{place: [long, 5] if place == "prompt" else long})
    assert response.status_code in {400, 404}
    assert len(response.content) < 1000


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("body", [b"-1e999", b"1e999", b"5", b"1.5", b"null", b"true", b'"a"', b"[]", b"1" * 400])
async def test_bodies_that_are_no_object(standing: Harness, body: bytes) -> None:
    response = await standing.http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert "send a JSON object" in response.json()["error"]["message"]
