"""POST /v1/responses as OpenAI's own client asks it, without anything stored between requests."""

import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from strata_runtime.gateway.http.dialect import Told, Usage
from strata_runtime.gateway.http.prompts import Bounds
from strata_runtime.gateway.http.responses.answers import ResponseDialect
from strata_runtime.gateway.http.responses.chat import prepare_response
from strata_runtime.gateway.http.responses.parameters import OTHERS, read_response
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.choice import Piece
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.laws import share
from tests.runtime.gateway.chats import API_KEY, LONGEST, WEATHER, Chatting, chatting

FOX = "the quick brown fox jumps"
ASKED: dict[str, Any] = {"model": "tiny", "input": "hello"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "description": "Tells the weather", "parameters": SCHEMA, "strict": True}


shared = pytest.mark.asyncio(loop_scope="module")  # one gateway for all: each takes a fifth of a second to end


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(plain: Chatting) -> AsyncIterator[openai.AsyncOpenAI]:
    async with a_client(plain) as one:
        yield one


def a_client(of: Chatting, api_key: str = API_KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{of.url}/v1", api_key=api_key, max_retries=0)


async def both(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    """The whole answer; what is streamed comes to the same, and its pieces to what is told at their ends."""
    asked = ASKED | fields
    whole = await client.responses.create(**asked)
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert kept(events[-1].response) == kept(whole)
    for event in events:
        match event.type:
            case "response.output_text.done":
                assert joined(events, "response.output_text.delta", event.item_id) == event.text
            case "response.reasoning_text.done":
                assert joined(events, "response.reasoning_text.delta", event.item_id) == event.text
            case "response.function_call_arguments.done":
                assert joined(events, "response.function_call_arguments.delta", event.item_id) == event.arguments
            case "response.output_item.done":
                assert event.item == events[-1].response.output[event.output_index]
    return whole


def joined(events: list[Any], kind: str, item: str) -> str:
    return "".join(event.delta for event in events if event.type == kind and event.item_id == item)


def kept(response: Response) -> dict[str, Any]:
    """All but names that are new each time."""
    plain = response.model_dump(exclude={"id", "created_at"})
    for item in plain["output"]:
        del item["id"]
        item.pop("call_id", None)
    return plain


async def post(of: Chatting, **body: Any) -> httpx.Response:
    return await of.gateway.http.post("/v1/responses", json=body, headers={"Authorization": f"Bearer {API_KEY}"})


# Answers


@shared
async def test_text(plain: Chatting, monkeypatch: pytest.MonkeyPatch, client: openai.AsyncOpenAI) -> None:
    plain.says(FOX)
    monkeypatch.setattr(plain.leader, "found", 4)
    answer = await both(client, instructions="be brief", metadata={"a": "b"}, temperature=0.5, top_p=0.9)
    assert (answer.output_text, answer.status, answer.error, answer.incomplete_details) == (
        FOX,
        "completed",
        None,
        None,
    )
    assert (answer.id[:5], answer.object, answer.model, answer.store) == ("resp_", "response", "tiny", False)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("be brief", {"a": "b"}, 0.5)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    submit = plain.leader.submits[-1]
    assert plain.asked == "<|system|>be brief\n<|user|>hello\n<|assistant|>"
    assert (submit.sampling.temperature, submit.sampling.top_p) == (0.5, 0.9)
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len(submit.prompt), 4)
    assert usage.output_tokens == len(plain.tokenizer.encode(FOX)) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@shared
async def test_the_clients_own_stream(plain: Chatting, client: openai.AsyncOpenAI) -> None:
    plain.says("I look." + WEATHER)
    async with client.responses.stream(**ASKED, tools=[TOOL]) as stream:
        final = await stream.get_final_response()
    said, call = final.output
    assert (said.content[0].text, call.parsed_arguments) == ("I look.", {"city": "Köln", "days": 2})


@shared
async def test_items_are_told_in_order(plain: Chatting) -> None:
    plain.says("a" + WEATHER)
    response = await post(plain, **ASKED, tools=[TOOL], stream=True)
    lines = [line for line in response.text.split("\n") if line]
    names = [line.removeprefix("event: response.") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in events] == [f"response.{name}" for name in names]
    assert [name for place, name in enumerate(names) if name != names[place - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


@shared
async def test_the_most_tokens(plain: Chatting, client: openai.AsyncOpenAI) -> None:
    plain.says(FOX)
    answer = await both(client, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[-1].status == "incomplete"
    assert (answer.usage.output_tokens, answer.max_output_tokens) == (3, 3)


@shared
async def test_no_text_is_no_item(plain: Chatting, client: openai.AsyncOpenAI) -> None:
    plain.says("")
    assert (await both(client)).output == []


@shared
async def test_log_probabilities(plain: Chatting, client: openai.AsyncOpenAI) -> None:
    text = "fox \U0001f99d"
    plain.says(text)
    answer = await both(client, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = answer.output[0].content[0].logprobs
    assert bytes(byte for one in logprobs for byte in one.bytes).decode() == text
    assert {len(one.top_logprobs) for one in logprobs} == {2}
    streamed = [event async for event in await client.responses.create(**ASKED, top_logprobs=2, stream=True)]
    told = [one for event in streamed if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in told] == [one.token for one in logprobs]
    with pytest.raises(openai.BadRequestError, match="thoughts or calls") as refused:
        await client.responses.create(**ASKED, top_logprobs=2, tools=[TOOL])
    assert refused.value.param == "top_logprobs"


# Tools, thoughts and forms


@shared
async def test_a_call_its_result_and_the_answer(plain: Chatting, client: openai.AsyncOpenAI) -> None:
    plain.says("I look." + WEATHER)
    answer = await both(client, tools=[TOOL])
    call = answer.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Köln", "days": 2},
    )
    assert (answer.status, answer.tools[0].name, call.call_id[:5]) == ("completed", "weather", "call_")
    plain.says("Rain.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [{"role": "user", "content": "hello"}, *answer.output, result]
    again = await both(client, tools=[TOOL], input=items)
    assert again.output_text == "Rain."
    behind = plain.asked.partition("<|user|>")[2]
    assert behind == f"hello\n<|assistant|>I look.{WEATHER}\n<|tool|>rain of weather\n<|assistant|>"


@pytest.mark.parametrize(
    ("choice", "is_held"),
    [("auto", False), ("none", False), ("required", True), ({"type": "function", "name": "weather"}, True)],
)
@shared
async def test_which_tools_may_be_called(
    plain: Chatting, client: openai.AsyncOpenAI, choice: Any, *, is_held: bool
) -> None:
    plain.says(WEATHER * 2)
    answer = await both(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert (plain.leader.submits[-1].sampling.rules is not None) == is_held
    assert [item.type for item in answer.output] == ["message" if choice == "none" else "function_call"]
    assert (answer.tools == []) == ("<tools>" not in plain.asked) == (choice == "none")


@shared
async def test_thoughts(thinking: Chatting) -> None:
    thinking.says("<think>hm\n</think>\n\nfox")
    async with a_client(thinking) as client:
        answer = await both(client, reasoning={"effort": "low"}, include=["reasoning.encrypted_content"])
        thought, said = answer.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "hm\n", [])
        assert (said.content[0].text, answer.output_text) == ("fox", "fox")
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
        assert thinking.asked.endswith("<|assistant|>(low)")
        items = [{"role": "user", "content": "hello"}, *answer.output, {"role": "user", "content": "and?"}]
        await client.responses.create(model="tiny", input=items)
        assert thinking.asked == "<|user|>hello\n<|assistant|>[hm\n]fox\n<|user|>and?\n<|assistant|>"


class City(pydantic.BaseModel):
    city: str
    days: int


@shared
async def test_structured_output(plain: Chatting, client: openai.AsyncOpenAI) -> None:
    plain.says('{"city":"Köln","days":2}')
    answer = await client.responses.parse(**ASKED, text_format=City)
    assert answer.output_parsed == City(city="Köln", days=2)
    rules = plain.leader.submits[-1].sampling.rules
    assert rules is not None
    assert rules.grammar is not None
    assert json.loads(rules.grammar.text)["required"] == ["city", "days"]
    items = [{"role": "user", "content": "a"}, *answer.output, {"role": "user", "content": "b"}]
    again = await both(client, input=items, text={"format": {"type": "json_object"}})
    assert again.text.format.type == "json_object"
    assert plain.asked == '<|user|>a\n<|assistant|>{"city":"Köln","days":2}\n<|user|>b\n<|assistant|>'


@shared
async def test_items_of_every_shape(plain: Chatting, client: openai.AsyncOpenAI) -> None:
    plain.says(FOX)
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "shout"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "d"}],
            "encrypted_content": None,
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "e"}]},
        {"role": "user", "content": "g"},
    ]
    await client.responses.create(model="tiny", instructions="be brief", input=items)
    called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert plain.asked == (
        "<|system|>be brief\n\nshout\n<|user|>ab\n<|assistant|>c\n"
        f"<|assistant|>[d]{called}\n<|tool|>e of f\n<|user|>g\n<|assistant|>"
    )


# Errors

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}
REFUSED = [
    pytest.param({"input": None}, "input", "required", id="no input"),
    pytest.param({"input": 5}, "input", "a list of items", id="a number"),
    pytest.param({"input": []}, "input", "at least 1", id="no item"),
    pytest.param({"input": [{}] * (LONGEST + 1)}, "input", "send fewer", id="many items"),
    pytest.param({"input": "a " * 4 * LONGEST}, "input", "input has", id="long"),
    pytest.param({"input": [5]}, "input.0", "got `int`", id="item of no kind"),
    pytest.param({"input": [{"content": "a"}]}, "input.0.role", "required", id="no role"),
    pytest.param({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "'developer'", id="role"),
    pytest.param({"input": [IMAGE]}, "input.0.content.0.type", "'input_text'", id="image"),
    pytest.param({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "items here are", id="reference"),
    pytest.param({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type", "not supported", id="web search"),
    pytest.param({"input": [{"role": "user", "content": "a", "b": 1}]}, "input.0.b", "not a parameter", id="field"),
    pytest.param({"input": [{"type": "function_call"}]}, "input.0.call_id", "required", id="call"),
    pytest.param({"input": [CALL]}, "input.0.arguments", "truncated", id="broken"),
    pytest.param({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content", "", id="-"),
    pytest.param({"max_output_tokens": 0}, "max_output_tokens", ">= 1", id="no tokens"),
    pytest.param({"max_output_tokens": 10**6}, "max_output_tokens", "and max_output_tokens=1000000", id="tokens"),
    pytest.param({"previous_response_id": "x"}, "previous_response_id", "leave it out", id="an earlier response"),
    pytest.param({"conversation": "x"}, "conversation", "leave it out", id="conversation"),
    pytest.param({"background": True}, "background", "or send false", id="background"),
    pytest.param({"truncation": "auto"}, "truncation", "'auto'", id="truncation"),
    pytest.param({"tools": [{"type": "web_search"}]}, "tools.0.type", "no tools of its own", id="a tool of a server"),
    pytest.param({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name", "regex", id="name of a tool"),
    pytest.param({"tools": [TOOL | {"parameters": 5}]}, "tools.0.parameters", "got `int`", id="schema"),
    pytest.param({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice", "not valid", id="choice"),
    pytest.param({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'", id="other"),
    pytest.param({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "send", id="none"),
    pytest.param(
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format.schema",
        "text.format.schema has not, which",
        id="schema that cannot be kept",
    ),
    pytest.param({"text": {"verbosity": "low"}}, "text.verbosity", "null", id="verbosity"),
    pytest.param({"reasoning": {"effort": "low"}}, "reasoning.effort", "reasoning.effort='low' is not", id="effort"),
    pytest.param({"reasoning": {"summary": "auto"}}, "reasoning.summary", "null", id="summary"),
    pytest.param({"include": ["file_search_call.results"]}, "include.0", "file_search_call.results", id="include"),
    pytest.param({"metadata": {"a": 1}}, "metadata", "got `int`", id="metadata"),
    pytest.param({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "True", id="pad"),
    pytest.param({"messages": []}, "messages", "not a parameter", id="chat's"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
@shared
async def test_what_cannot_be_done_is_refused_by_name(
    plain: Chatting, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await post(plain, **ASKED | fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert len(response.content) < 1000


@shared
async def test_what_changes_nothing_is_accepted(plain: Chatting) -> None:
    plain.says(FOX)
    unused = {name: known[0] for name, known in OTHERS.unsupported.items() if known}
    nothing = dict.fromkeys(OTHERS.unsupported.keys() - unused.keys())
    assert (await post(plain, **ASKED, **unused, **nothing, **dict.fromkeys(OTHERS.harmless, "x"))).status_code == 200
    assert (await post(plain, **ASKED, store=True)).json()["store"] is False


@shared
async def test_errors_are_the_clients_own_classes(
    plain: Chatting, monkeypatch: pytest.MonkeyPatch, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        await client.responses.create(model="gpt-4", input="hello")
    async with a_client(plain, "a wrong key") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**ASKED, previous_response_id="resp_1")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    monkeypatch.setattr(plain.leader, "fail_at", 0)
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(**ASKED, stream=True)


@shared
async def test_a_failure_in_mid_stream_is_its_last_event(
    plain: Chatting, monkeypatch: pytest.MonkeyPatch, client: openai.AsyncOpenAI
) -> None:
    plain.says(FOX)
    monkeypatch.setattr(plain.leader, "fail_at", 3)
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    last = events[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert last.response.output[0].status == "incomplete"
    assert FOX.startswith(last.response.output_text)


async def test_bounds(tools_model: Tokenizer) -> None:
    limits = Limits(max_requests=1, max_body_bytes=300)
    async with chatting(tools_model, limits=limits) as one, a_client(one) as client:
        with pytest.raises(openai.APIStatusError) as large:
            await client.responses.create(**ASKED, instructions="x" * 300)
        assert large.value.status_code == 413
        one.leader.allow(1)
        stream = await client.responses.create(**ASKED, max_output_tokens=9, stream=True)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**ASKED)
        one.leader.allow(None)
        async for _ in stream:
            pass


# Laws

TEXTS = st.lists(st.sampled_from(["<think>", "</think>", WEATHER, "\n"]) | st.text(max_size=4), max_size=8).map("".join)


def a_dialect(tokenizer: Tokenizer) -> ResponseDialect:
    body = read_response(json.dumps(ASKED | {"tools": [TOOL]}).encode())
    prepared, said_again = prepare_response(body, tokenizer, Bounds(LONGEST, 1))
    return ResponseDialect(prepared, tokenizer, "tiny", said_again)


@settings(deadline=None, max_examples=share(200))
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200)), reason=st.sampled_from(["stop", "length"]))
def test_what_is_streamed_comes_to_the_whole(
    thoughts_model: Tokenizer, text: str, cuts: list[int], reason: Any
) -> None:
    usage = Usage(3, 5, 0)
    whole = a_dialect(thoughts_model)
    whole.heard(0, Piece(text, (), reason))
    expected = whole.whole([Told(text, None, reason, None)], usage)
    streamed = a_dialect(thoughts_model)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    raw = b"".join(streamed.opening(usage))
    for start, end in zip(places, [*places[1:], None], strict=True):
        raw += b"".join(streamed.piece(0, Piece(text[start:end], (), reason if end is None else None)))
    raw += b"".join(streamed.ending(usage))
    events = [json.loads(line.removeprefix("data: ")) for line in raw.decode().split("\n") if line.startswith("data: ")]
    items: dict[str, list[str]] = {}
    for event, number in zip(events, count(), strict=False):
        assert event["sequence_number"] == number
        if event["type"] == "response.output_item.added":
            items[event["item"]["id"]] = []
        elif event["type"].endswith(".delta"):
            items[event["item_id"]].append(event["delta"])
    final = events[-1]["response"]
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in final["output"]]
    assert ["".join(pieces) for pieces in items.values()] == texts
    assert [of(item) for item in final["output"]] == [of(item) for item in expected["output"]]
    assert final["status"] == expected["status"] == ("completed" if reason == "stop" else "incomplete")


def of(item: dict[str, Any]) -> dict[str, Any]:
    told = json.loads(json.dumps(item, default=lambda raw: json.loads(bytes(raw))))
    return {name: value for name, value in told.items() if name not in {"id", "call_id"}}
