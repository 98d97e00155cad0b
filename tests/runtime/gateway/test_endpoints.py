"""Paths beside generation: tokens of text, the state of the process, what is not served, and what web pages get."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from strata_runtime.gateway.http.api_keys import ApiKeys
from strata_runtime.gateway.http.openapi import _BODIES, _RAW
from strata_runtime.gateway.http.tokenization import LEAST_BOUND
from strata_runtime.gateway.settings import Limits, Pages
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, a_gateway, endless
from tests.runtime.gateway.models import write_model_folder

TEXT = "hello \u4e2d\u6587 world"
CHAT = [{"role": "user", "content": "hello"}]
SITE = "https://chat.example.org"


@pytest.fixture
async def alone(tokenizer: Tokenizer) -> AsyncIterator[Harness]:
    """A gateway without a route."""
    async with a_gateway(tokenizer) as harness:
        yield harness


async def ask(gateway: Harness, path: str, **body: Any) -> Any:
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


# Tokens


async def test_tokens_of_a_prompt(gateway: Harness, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    answer = await ask(gateway, "/tokenize", model="tiny", prompt=TEXT)
    assert answer == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}


async def test_tokens_as_the_vocabulary_writes_them(alone: Harness) -> None:
    answer = await ask(alone, "/tokenize", prompt="hello world", return_token_strs=True)
    assert "".join(answer["token_strs"]) == "hello\u0120world"
    assert len(answer["token_strs"]) == answer["count"]


async def test_tokens_of_a_conversation_are_those_of_its_request(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    await gateway.chat(max_tokens=1)
    assert (await ask(gateway, "/tokenize", messages=CHAT))["tokens"] == leader.submits[0].prompt
    bare = await ask(gateway, "/tokenize", messages=CHAT, add_generation_prompt=False)
    assert tokenizer.decode(bare["tokens"]) == "<|user|>hello\n"


async def test_without_a_route_nobody_knows_the_longest_context(alone: Harness, tokenizer: Tokenizer) -> None:
    answer = await ask(alone, "/tokenize", prompt=TEXT)
    assert (answer["tokens"], answer["max_model_len"]) == (tokenizer.encode(TEXT), None)
    assert await ask(alone, "/detokenize", tokens=answer["tokens"]) == {"prompt": TEXT}


async def test_special_tokens_are_added_and_shown(tmp_path: Path) -> None:
    backend = json.loads((write_model_folder(tmp_path) / "tokenizer.json").read_text())
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    async with a_gateway(load_tokenizer(tmp_path)) as gateway:
        tokens = (await ask(gateway, "/tokenize", prompt=TEXT))["tokens"]
        bare = (await ask(gateway, "/tokenize", prompt=TEXT, add_special_tokens=False))["tokens"]
        assert tokens == [0, *bare]
        assert (await ask(gateway, "/tokenize", messages=CHAT))["tokens"][0] != 0
        assert (await ask(gateway, "/tokenize", messages=CHAT, add_special_tokens=True))["tokens"][0] == 0
        assert await ask(gateway, "/detokenize", tokens=tokens) == {"prompt": f"<s>{TEXT}"}


async def test_no_text_has_no_tokens(alone: Harness) -> None:
    assert (await ask(alone, "/tokenize", prompt=""))["count"] == 0
    assert await ask(alone, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_more_tokens_than_a_pipeline_takes_are_counted(gateway: Harness, tokenizer: Tokenizer) -> None:
    text = "hello " * 2000
    answer = await ask(gateway, "/tokenize", prompt=text)
    assert answer["count"] == len(tokenizer.encode(text)) > answer["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        pytest.param("tokenize", {}, "prompt", "one of them is required", id="nothing"),
        pytest.param("tokenize", {"prompt": None}, "prompt", "one of them is required", id="null"),
        pytest.param("tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "send one of them", id="both"),
        pytest.param("tokenize", {"prompt": ["a"]}, "prompt", "send one string", id="two prompts"),
        pytest.param("tokenize", {"prompt": 5}, "prompt", "send one string", id="a number"),
        pytest.param("tokenize", {"messages": []}, "messages", "at least 1", id="no message"),
        pytest.param("tokenize", {"messages": [{"role": "user"}]}, "messages.0.content", "required", id="no content"),
        pytest.param(
            "tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "expected `bool", id="flag"
        ),
        pytest.param("tokenize", {"prompt": "a", "temprature": 1}, "temprature", "spelling", id="unknown name"),
        pytest.param("tokenize", {"messages": CHAT, "tools": [1]}, "tools.0", "got `int`", id="tools"),
        pytest.param(
            "tokenize",
            {"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
            "leave it out",
            id="another template",
        ),
        pytest.param(
            "tokenize", {"prompt": " x" * 2 * LEAST_BOUND}, "prompt", f"more than {LEAST_BOUND} tokens", id="long"
        ),
        pytest.param(
            "tokenize",
            {"messages": [{"role": "user", "content": " x" * 2 * LEAST_BOUND}]},
            "messages",
            f"more than {LEAST_BOUND} tokens",
            id="long chat",
        ),
        pytest.param("detokenize", {}, "tokens", "required", id="no tokens"),
        pytest.param("detokenize", {"tokens": "a"}, "tokens", "list of token ids", id="text"),
        pytest.param("detokenize", {"tokens": [5, -1]}, "tokens.1", ">= 0", id="negative"),
        pytest.param("detokenize", {"tokens": [5, "a"]}, "tokens.1", "got `str`", id="mixed"),
        pytest.param("detokenize", {"tokens": [5, 10**6]}, "tokens", "vocabulary ends at", id="no token"),
        pytest.param("detokenize", {"tokens": [5] * (LEAST_BOUND + 1)}, "tokens", "send them in parts", id="many"),
    ],
)
async def test_bad_bodies(alone: Harness, path: str, body: Any, param: str, words: str) -> None:
    response = await alone.http.post(f"/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]
    assert len(response.content) < 1000


async def test_text_is_bounded_before_it_is_tokenized(alone: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = alone.gateway.tokenizer
    encode, taken = tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **flags: taken.append(len(text)) or encode(text, **flags))
    response = await alone.http.post("/tokenize", json={"prompt": "a b " * 60_000})
    assert response.status_code == 400
    assert max(taken) <= 1 << 14
    assert sum(taken) < 240_000


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_the_rules_of_bodies_are_those_of_generation(tokenizer: Tokenizer, path: str) -> None:
    limits = Limits(max_body_bytes=200, max_held_body_bytes=200)
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [5]}
    async with a_gateway(tokenizer, limits=limits, api_keys=ApiKeys(("key",))) as gateway:
        assert (await gateway.http.post(path, json=body)).status_code == 401
        gateway.http.headers["Authorization"] = "Bearer key"
        assert (await gateway.http.post(path, json=body)).status_code == 200
        assert (await gateway.http.get(path)).status_code == 405
        assert (await gateway.http.post(path, content=json.dumps(body))).status_code == 415
        assert (await gateway.http.post(path, json=body | {"user": "x" * 200})).status_code == 413
        refused = await gateway.http.post(path, json=body | {"model": "gpt-4"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


# The process


async def test_the_version(alone: Harness) -> None:
    assert (await alone.http.get("/version")).json() == {"version": version("strata-llm")}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health_in_short(tokenizer: Tokenizer, leader: FakeLeader, method: str) -> None:
    async with a_gateway(tokenizer, api_keys=ApiKeys(("key",))) as gateway:
        response = await gateway.http.request(method, "/ping")
        assert (response.status_code, response.json()) == (503, (await gateway.http.get("/health")).json())
        await gateway.connect(leader)
        response = await gateway.http.request(method, "/ping")
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/audio/speech", "speech"),
        ("POST", "/v1/audio/transcriptions", "speech"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/moderations", "moderation"),
        ("POST", "/v1/rerank", "ranking"),
        ("POST", "/v1/score", "scores"),
        ("POST", "/pooling", "pooling"),
        ("GET", "/classify", "classification"),
    ],
)
async def test_what_is_not_served_is_named(alone: Harness, method: str, path: str, what: str) -> None:
    response = await alone.http.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unsupported_endpoint")
    assert error["message"].startswith(f"{method} {path}: this deployment serves text generation only, no {what}")


@pytest.mark.parametrize("path", ["/v1/embeddingsx", "/v1/imagesque/a", "/scores"])
async def test_other_paths_are_only_not_found(alone: Harness, path: str) -> None:
    response = await alone.http.post(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, None)


# Web pages


@pytest.fixture
async def open_to_site(tokenizer: Tokenizer, leader: FakeLeader) -> AsyncIterator[Harness]:
    pages = Pages(allowed_origins=(SITE, "http://localhost:3000"))
    limits = Limits(max_body_bytes=200)
    async with a_gateway(tokenizer, limits=limits, api_keys=ApiKeys(("key",)), pages=pages) as gateway:
        await gateway.connect(leader)
        gateway.http.headers["Authorization"] = "Bearer key"
        yield gateway


async def preflight(gateway: Harness, origin: str, headers: str = "authorization, content-type") -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    return await gateway.http.options("/v1/chat/completions", headers=asked)


async def test_a_page_asks_whether_it_may(open_to_site: Harness) -> None:
    del open_to_site.http.headers["Authorization"]  # browsers send no key yet
    response = await preflight(open_to_site, SITE, "authorization,content-type,x-stainless-os")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == SITE
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert "access-control-allow-credentials" not in response.headers


async def test_other_pages_may_not(open_to_site: Harness) -> None:
    response = await preflight(open_to_site, "https://elsewhere.example")
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    models = await open_to_site.http.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in models.headers


async def test_no_page_may_unless_it_is_allowed(gateway: Harness) -> None:
    response = await preflight(gateway, SITE)
    assert response.status_code == 405
    answered = await gateway.http.get("/v1/models", headers={"Origin": SITE})
    assert not [name for name in (*response.headers, *answered.headers) if name.startswith("access-control")]


async def test_all_pages_may(tokenizer: Tokenizer) -> None:
    async with a_gateway(tokenizer, pages=Pages(allowed_origins=("*",))) as gateway:
        assert (await preflight(gateway, SITE)).headers["access-control-allow-origin"] == "*"
        answered = await gateway.http.get("/version", headers={"Origin": "null"})
        assert answered.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("stream", [False, True])
async def test_pages_read_answers(open_to_site: Harness, *, stream: bool) -> None:
    open_to_site.http.headers["Origin"] = SITE
    response = await open_to_site.complete(max_tokens=3, stream=stream)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == SITE
    assert "Origin" in response.headers["vary"]
    assert stream == response.text.endswith("data: [DONE]\n\n")


async def test_pages_read_errors(open_to_site: Harness, leader: FakeLeader, monkeypatch: pytest.MonkeyPatch) -> None:
    http = open_to_site.http
    http.headers["Origin"] = SITE
    leader.fail_at = 0
    responses = [
        await http.get("/v1/nothing"),
        await http.post("/v1/embeddings"),
        await http.get("/v1/completions"),
        await http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}),
        await http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}),
        await http.get("/v1/models", headers={"Authorization": "Bearer other"}),
        await open_to_site.complete(prompt="x" * 300),
        await open_to_site.complete(),
    ]
    assert [each.status_code for each in responses] == [404, 404, 405, 400, 415, 401, 413, 500]
    assert {each.headers.get("access-control-allow-origin") for each in responses} == {SITE}
    monkeypatch.setattr(open_to_site.dispatcher, "load", None)  # an error of our own
    http._transport.raise_app_exceptions = False
    failed = await http.get("/health")
    assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (500, SITE)


async def test_a_page_that_is_told_to_wait_reads_for_how_long(tokenizer: Tokenizer) -> None:
    async with a_gateway(tokenizer, pages=Pages(allowed_origins=(SITE,))) as gateway:
        gateway.http.headers["Origin"] = SITE
        response = await gateway.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.headers["access-control-expose-headers"] == "Retry-After"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_that_goes_away_ends_its_request(
    tokenizer: Tokenizer, leader: FakeLeader, *, stream: bool
) -> None:
    leader.model = endless(tokenizer)
    leader.allow(2)
    pages = Pages(allowed_origins=(SITE,))
    async with a_gateway(tokenizer, pages=pages) as gateway, httpx.AsyncClient() as client:
        await gateway.connect(leader)
        async with gateway.serving() as url:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 100, "stream": stream}

            async def read() -> None:
                async with client.stream(
                    "POST", f"{url}/v1/completions", json=body, headers={"Origin": SITE}
                ) as response:
                    async for _ in response.aiter_bytes():
                        arrived.set()

            arrived = asyncio.Event()
            reading = asyncio.create_task(read())
            await (arrived.wait() if stream else leader.until(lambda: leader.submits))
            reading.cancel()
            await leader.until(lambda: leader.aborts == [leader.submits[0].request])
            await gateway.until(lambda: gateway.dispatcher.status().running_requests == 0)


# The description


async def test_the_interface_is_described_on_request_only(alone: Harness, tokenizer: Tokenizer) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert (await alone.http.get(path)).status_code == 404
    async with a_gateway(tokenizer, pages=Pages(docs=True)) as gateway:
        assert "/openapi.json" in (await gateway.http.get("/docs")).text
        assert (await gateway.http.get("/redoc")).status_code == 404


async def test_the_description_has_paths_and_bodies(tokenizer: Tokenizer) -> None:
    async with a_gateway(tokenizer, pages=Pages(docs=True)) as gateway:
        document = (await gateway.http.get("/openapi.json")).json()
    assert document["info"]["version"] == version("strata-llm")
    served = {"/health", "/metrics", "/ping", "/version", "/v1/models", "/v1/models/{name}", *_BODIES}
    assert document["paths"].keys() == served
    schemas = document["components"]["schemas"]
    for path in _BODIES:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["$ref"].removeprefix("#/components/schemas/") in schemas
    temperature = schemas["ChatBody"]["properties"]["temperature"]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    for place in _RAW:
        name, _, field = place.partition(".")
        assert schemas[name]["properties"][field] == _RAW[place]
    assert "422" not in json.dumps(document)
    places = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document))
    assert set(places) <= schemas.keys()


@pytest.mark.parametrize(
    ("name", "body", "valid"),
    [
        pytest.param("ChatBody", {"model": "tiny", "messages": CHAT, "stop": ["a"], "seed": None}, True, id="chat"),
        pytest.param("ChatBody", {"model": "tiny", "messages": []}, False, id="no message"),
        pytest.param("ChatBody", {"model": "tiny", "messages": CHAT, "temperature": 3}, False, id="hot"),
        pytest.param("CompletionBody", {"model": "tiny", "prompt": [[1, 2], [3]]}, True, id="token ids"),
        pytest.param("CompletionBody", {"model": "tiny", "prompt": 5}, False, id="no prompt"),
        pytest.param("TokenizeBody", {"messages": CHAT, "add_special_tokens": True}, True, id="tokenize"),
        pytest.param("DetokenizeBody", {"model": "tiny"}, False, id="no tokens"),
    ],
)
async def test_the_description_says_what_the_server_does(
    gateway: Harness, tokenizer: Tokenizer, name: str, body: dict[str, Any], *, valid: bool
) -> None:
    async with a_gateway(tokenizer, pages=Pages(docs=True)) as described:
        document = (await described.http.get("/openapi.json")).json()
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    assert Draft202012Validator(schema).is_valid(body) == valid
    path = next(path for path, kind in _BODIES.items() if kind.__name__ == name)
    assert (await gateway.http.post(path, json=body)).status_code == (200 if valid else 400)
