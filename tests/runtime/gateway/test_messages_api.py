"""POST /v1/messages as Anthropic's own client asks it, and what its errors and its blocks are."""

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.gateway.http.blocks import Begins, Block, Blocks, Ends, Grows
from strata_runtime.gateway.http.messages.answers import _input
from strata_runtime.gateway.http.messages.parameters import OTHERS
from strata_runtime.gateway.http.prompts import Parsing
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.text.reasoning import REASONING_FORMATS
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from strata_runtime.gateway.text.tool_formats import TOOL_FORMATS, tool_format
from tests.laws import Lazy, share
from tests.runtime.gateway.chats import API_KEY, LONGEST, THOUGHTS, WEATHER, Chatting, chatting
from tests.runtime.gateway.harness import Harness, a_gateway
from tests.runtime.gateway.models import write_model_folder

anthropic = Lazy("anthropic")
FOX = "the quick brown fox jumps"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"name": "weather", "description": "Tells the weather", "input_schema": SCHEMA}
ASKED = {"model": "tiny", "max_tokens": 200, "messages": HELLO}


shared = pytest.mark.asyncio(loop_scope="module")  # one gateway for all: each takes a fifth of a second to end


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(plain: Chatting) -> "AsyncIterator[anthropic.AsyncAnthropic]":
    async with a_client(plain) as one:
        yield one


def a_client(of: Chatting, api_key: str = API_KEY) -> "anthropic.AsyncAnthropic":
    return anthropic.AsyncAnthropic(base_url=of.url, api_key=api_key, max_retries=0)


async def both(client: "anthropic.AsyncAnthropic", **fields: Any) -> "anthropic.types.Message":
    """The whole answer; what is streamed comes to the same."""
    asked = ASKED | fields
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert kept(streamed) == kept(whole)
    return whole


def kept(message: "anthropic.types.Message") -> dict[str, Any]:
    """All but names that are new each time."""
    plain = message.model_dump(exclude={"id"}, exclude_none=True)
    for block in plain["content"]:
        block.pop("id", None)
    return plain


async def post(of: Chatting, path: str = "", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await of.gateway.http.post(
        f"/v1/messages{path}", json=body, headers={"x-api-key": API_KEY} | (headers or {})
    )


# Answers


@shared
async def test_text(plain: Chatting, monkeypatch: pytest.MonkeyPatch, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX)
    monkeypatch.setattr(plain.leader, "found", 4)
    answer = await both(client, system="be brief")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": FOX}]
    assert (answer.id[:4], answer.role, answer.model, answer.stop_reason) == ("msg_", "assistant", "tiny", "end_turn")
    prompt = plain.leader.submits[-1].prompt
    assert plain.asked == "<|system|>be brief\n<|user|>hello\n<|assistant|>"
    assert answer.usage.input_tokens == len(prompt) - 4
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (4, 0)
    assert answer.usage.output_tokens == len(plain.tokenizer.encode(FOX)) + 1


@shared
async def test_no_text_is_no_block(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says("")
    assert (await both(client)).content == []


@shared
async def test_events_have_names_and_an_order(plain: Chatting) -> None:
    plain.says("a" + WEATHER)
    response = await post(plain, **ASKED, tools=[TOOL], stream=True)
    lines = [line for line in response.text.split("\n") if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in events] == names
    once = [name for place, name in enumerate(names) if name != names[place - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert response.headers["content-type"].startswith("text/event-stream")


@shared
async def test_a_stop_sequence_is_told(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX)
    answer = await both(client, stop_sequences=["fox", "brown"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "brown")
    assert answer.content[0].text == "the quick "


@shared
async def test_the_most_tokens(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX * 9)
    answer = await both(client, max_tokens=3)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


@pytest.mark.slow
@shared
async def test_more_tokens_than_the_context_has_are_those_that_it_has(plain: Chatting) -> None:
    """Clients of this interface must say a number, and know no model's context."""
    plain.says("a" * LONGEST)
    async with a_client(plain) as client:
        answer = await both(client, max_tokens=20_000)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + answer.usage.output_tokens == LONGEST


@shared
async def test_an_answer_goes_on_from_a_last_message_of_the_assistant(plain: Chatting) -> None:
    plain.says(" jumps")
    async with a_client(plain) as client:
        answer = await both(client, messages=[*HELLO, {"role": "assistant", "content": "the fox"}])
    assert plain.asked == "<|user|>hello\n<|assistant|>the fox"
    assert answer.content[0].text == " jumps"


@shared
async def test_sampling_parameters_reach_the_pipeline(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX)
    await client.messages.create(**ASKED, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
    sampling = plain.leader.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


# Tools


@shared
async def test_a_call_its_result_and_the_answer(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says("I look." + WEATHER)
    answer = await both(client, tools=[TOOL])
    said, call = answer.content
    assert (said.text, answer.stop_reason) == ("I look.", "tool_use")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Köln", "days": 2})
    assert call.id.startswith("toolu_")
    assert plain.asked.startswith(
        '<tools>{"type": "function", "function": {"name": "weather", "description": "Tells the'
    )
    plain.says("Rain.")
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},
        {"type": "text", "text": "well?", "cache_control": {"type": "ephemeral"}},
    ]
    turns = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    again = await both(client, tools=[TOOL], messages=turns)
    assert again.content[0].text == "Rain."
    behind = plain.asked.partition("<|user|>")[2]
    assert behind == f"hello\n<|assistant|>I look.{WEATHER}\n<|tool|>rain of weather\n<|user|>well?\n<|assistant|>"


@shared
async def test_results_of_calls_that_failed(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX)
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "no network"}
    turns = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    await client.messages.create(**ASKED | {"messages": turns})
    assert "<|tool|>Error: no network of f\n" in plain.asked


@shared
async def test_further_messages_of_a_role_are_one_turn(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX)
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}]},
        {"role": "user", "content": "f"},
    ]
    await client.messages.create(**ASKED | {"messages": turns})
    assert plain.asked == "<|user|>a\nb\nc\n<|assistant|>de\n<|user|>f\n<|assistant|>"


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        pytest.param({"type": "auto"}, None, id="auto"),
        pytest.param({"type": "none"}, None, id="none"),
        pytest.param({"type": "any"}, "tags_with_separator", id="any"),
        pytest.param({"type": "any", "disable_parallel_tool_use": True}, "or", id="one of any"),
        pytest.param({"type": "tool", "name": "weather"}, "or", id="named"),
    ],
)
@shared
async def test_which_tools_may_be_called(
    plain: Chatting, client: "anthropic.AsyncAnthropic", choice: dict[str, Any], form: str | None
) -> None:
    plain.says(WEATHER)
    answer = await client.messages.create(**ASKED, tools=[TOOL], tool_choice=choice)
    rules = plain.leader.submits[-1].sampling.rules
    assert (rules is not None) == (form is not None)
    assert ("<tools>" in plain.asked) == (choice["type"] != "none")
    assert answer.content[0].type == ("text" if choice["type"] == "none" else "tool_use")


@shared
async def test_calls_one_at_a_time(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(f"a{WEATHER}{WEATHER}")
    assert [block.type for block in (await both(client, tools=[TOOL])).content] == ["text", "tool_use", "tool_use"]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await both(client, tools=[TOOL], tool_choice=one)
    assert [block.type for block in answer.content] == ["text", "tool_use"]


@shared
async def test_a_call_that_is_cut_off(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(WEATHER)
    tokens = len(plain.tokenizer.encode(WEATHER.partition(', "days')[0]))
    answer = await both(client, tools=[TOOL], max_tokens=tokens)
    assert (answer.content[0].input, answer.stop_reason) == ({"city": "Köln"}, "max_tokens")


@pytest.mark.parametrize(
    ("arguments", "is_cut", "expected"),
    [
        ("", False, {}),
        ("", True, {}),
        ('{"a": 1.50}', False, {"a": 1.5}),
        ('{"a": [1, {"b"', True, {"a": [1, {}]}),
        ('{"a"', False, {"INVALID_JSON": '{"a"'}),
        ("{'a': 1}", True, {"INVALID_JSON": "{'a': 1}"}),
        ("[1", True, {"INVALID_JSON": "[1"}),
        ('{"a": ' + "[" * 5000, True, None),
    ],
)
def test_arguments_are_an_object_whatever_was_written(arguments: str, expected: Any, *, is_cut: bool) -> None:
    told = _input(arguments, is_cut=is_cut)
    found = told if isinstance(told, dict) else json.loads(bytes(told))
    assert found == ({"INVALID_JSON": arguments} if expected is None else expected)


# Thoughts and forms


@shared
async def test_thoughts(thinking: Chatting) -> None:
    thinking.says("<think>hm\n</think>\n\nfox")
    async with a_client(thinking) as client:
        answer = await both(client, thinking={"type": "enabled", "budget_tokens": 100})
        thought, said = answer.content
        assert (thought.type, thought.thinking, said.text) == ("thinking", "hm\n", "fox")
        assert thinking.asked.endswith("<|assistant|>")
        turns = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "and?"}]
        await client.messages.create(**ASKED | {"messages": turns})
        assert thinking.asked == "<|user|>hello\n<|assistant|>[hm\n]fox\n<|user|>and?\n<|assistant|>"


@shared
async def test_thoughts_can_be_turned_off(thinking: Chatting) -> None:
    thinking.says("fox")
    async with a_client(thinking) as client:
        await client.messages.create(**ASKED, thinking={"type": "disabled"})
        assert thinking.asked.endswith("<|assistant|><think></think>")
        await client.messages.create(**ASKED, thinking={"type": "adaptive"}, output_config={"effort": "low"})
        assert thinking.asked.endswith("<|assistant|>(low)")


@shared
async def test_a_model_without_thoughts(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX)
    await client.messages.create(**ASKED, thinking={"type": "disabled"})
    with pytest.raises(anthropic.BadRequestError, match="does not think aloud"):
        await client.messages.create(**ASKED, thinking={"type": "enabled", "budget_tokens": 1024})


async def test_a_model_that_always_thinks(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, chat_template=THOUGHTS.replace("enable_thinking", "other"))
    async with chatting(load_tokenizer(folder)) as one, a_client(one) as client:
        with pytest.raises(anthropic.BadRequestError, match="always thinks"):
            await client.messages.create(**ASKED, thinking={"type": "disabled"})


@shared
async def test_structured_output(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says('{"city":"Köln"}')
    answer = await both(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(answer.content[0].text) == {"city": "Köln"}
    rules = plain.leader.submits[-1].sampling.rules
    assert rules is not None
    assert rules.grammar is not None
    assert json.loads(rules.grammar.text) == SCHEMA


# Counting


@shared
async def test_tokens_are_counted_as_requests_have_them(plain: Chatting, client: "anthropic.AsyncAnthropic") -> None:
    plain.says(FOX)
    fields: dict[str, Any] = {
        "system": [{"type": "text", "text": "be brief"}],
        "tools": [TOOL],
        "messages": [*HELLO, {"role": "assistant", "content": "the"}],
    }
    counted = await client.messages.count_tokens(model="tiny", **fields)
    await client.messages.create(**ASKED | fields)
    assert counted.input_tokens == len(plain.leader.submits[-1].prompt)


async def test_counting_needs_no_leader(tools_model: Tokenizer) -> None:
    async with a_gateway(tools_model) as alone:
        counted = await alone.http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HELLO})
        assert counted.json() == {"input_tokens": len(tools_model.encode("<|user|>hello\n<|assistant|>"))}
        refused = await alone.http.post("/v1/messages", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        assert refused.headers["retry-after"]


# Errors


def blocks(*given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(given)}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
REFUSED = [
    pytest.param({"max_tokens": None}, "max_tokens is missing", id="no max_tokens"),
    pytest.param({"max_tokens": 0}, "max_tokens is not valid", id="no tokens"),
    pytest.param({"messages": []}, "at least 1", id="no message"),
    pytest.param({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role is not valid", id="role"),
    pytest.param(blocks(IMAGE), "messages.0.content.0.type is not valid: invalid value 'image'", id="image"),
    pytest.param(blocks({"type": "document"}), "the blocks here are text, tool_use", id="document"),
    pytest.param(
        blocks({"type": "text", "text": "a", "b": 1}), "messages.0.content.0.b is not a parameter", id="field"
    ),
    pytest.param(blocks({"type": "text", "text": "a", "citations": [1]}), "messages.0.content.0.citations", id="cited"),
    pytest.param(
        blocks(USE), "messages.0.content.0.type='tool_use' is not valid in a message of role 'user'", id="use"
    ),
    pytest.param(
        {"messages": [{"role": "assistant", "content": [USE | {"input": [1]}]}]},
        "messages.0.content.0.input is not valid",
        id="input",
    ),
    pytest.param({"messages": [{"role": "assistant", "content": [USE]}]}, "send its tool_result", id="no result"),
    pytest.param(
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type=", id="a tool of a server"
    ),
    pytest.param({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name is not valid", id="name of a tool"),
    pytest.param({"tools": [{"name": "a", "input_schema": 5}]}, "tools.0.input_schema", id="schema"),
    pytest.param({"tools": [{"name": "a"}]}, "tools.0.input_schema is missing", id="no schema"),
    pytest.param({"tools": [TOOL, TOOL]}, "two functions of one name", id="twice"),
    pytest.param({"tool_choice": {"type": "any"}}, "tool_choice needs tools", id="choice of none"),
    pytest.param({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "names 'f'", id="another name"),
    pytest.param({"tool_choice": {"type": "all"}}, "tool_choice.type is not valid", id="choice"),
    pytest.param({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing", id="no budget"),
    pytest.param(
        {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display is not valid", id="thoughts hidden"
    ),
    pytest.param({"output_config": {"effort": "low"}}, "output_config.effort='low' is not supported", id="effort"),
    pytest.param(
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema has not, which",
        id="schema that cannot be kept",
    ),
    pytest.param({"top_k": 10**6}, "top_k=1000000 is more than", id="top_k"),
    pytest.param({"stop_sequences": [""]}, "stop_sequences.0 is not valid", id="empty stop"),
    pytest.param({"n": 2}, "n is not a parameter", id="OpenAI's"),
    pytest.param({"container": "x"}, 'container="x" is not supported', id="container"),
    pytest.param(
        {"mcp_servers": [{"url": "x"}]}, "is not supported by this server: leave it out, or send []", id="MCP"
    ),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
@shared
async def test_what_cannot_be_done_is_refused_by_name(plain: Chatting, fields: dict[str, Any], words: str) -> None:
    response = await post(plain, **ASKED | fields)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in body["error"]["message"]
    assert len(response.content) < 1000


@shared
async def test_what_changes_nothing_is_accepted(plain: Chatting) -> None:
    plain.says(FOX)
    unused = {name: known[0] for name, known in OTHERS.unsupported.items() if known}
    harmless = {"metadata": {"user_id": "x"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    assert harmless.keys() == OTHERS.harmless
    assert (await post(plain, **ASKED, **unused, **harmless)).status_code == 200


@shared
async def test_errors_are_the_clients_own_classes(
    plain: Chatting, monkeypatch: pytest.MonkeyPatch, client: "anthropic.AsyncAnthropic"
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="'gpt-4' does not exist") as missing:
        await client.messages.create(**ASKED | {"model": "gpt-4"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="at least 1"):
        await client.messages.count_tokens(model="tiny", messages=[])
    monkeypatch.setattr(plain.leader, "fail_at", 0)
    with pytest.raises(anthropic.InternalServerError) as failed:
        await client.messages.create(**ASKED)
    assert failed.value.type == "api_error"


@shared
async def test_a_failure_in_mid_stream_is_raised(
    plain: Chatting, monkeypatch: pytest.MonkeyPatch, client: "anthropic.AsyncAnthropic"
) -> None:
    plain.says(FOX)
    monkeypatch.setattr(plain.leader, "fail_at", 3)
    stream = await client.messages.create(**ASKED, stream=True)
    with pytest.raises(anthropic.APIStatusError) as failed:
        async for _ in stream:
            pass
    assert failed.value.type == "api_error"


@shared
async def test_keys_come_in_either_header(plain: Chatting) -> None:
    plain.says(FOX)
    async with a_client(plain, "a wrong key") as stranger:
        with pytest.raises(anthropic.AuthenticationError, match="not one of this deployment's keys"):
            await stranger.messages.create(**ASKED)
    bearer = anthropic.AsyncAnthropic(base_url=plain.url, auth_token=API_KEY, max_retries=0)
    async with bearer:
        assert (await bearer.messages.create(**ASKED)).content[0].text == FOX
    http = plain.gateway.http
    assert (await http.get("/v1/models", headers={"x-api-key": API_KEY})).status_code == 200
    assert (await http.post("/v1/messages", json=ASKED)).json()["error"]["type"] == "authentication_error"


@shared
async def test_other_errors_have_the_same_shape(plain: Chatting) -> None:
    http, headers = plain.gateway.http, {"x-api-key": API_KEY}
    answers = {
        405: await http.get("/v1/messages"),
        404: await http.post("/v1/messages/batches", json={}),
        415: await http.post("/v1/messages", content=b"{}", headers=headers | {"Content-Type": "text/plain"}),
        400: await http.post("/v1/messages", content=b"{", headers=headers | {"Content-Type": "application/json"}),
    }
    for status, answer in answers.items():
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert (await http.get("/v1/messagesque")).json()["error"]["code"] is None  # OpenAI's shape


async def test_bounds(tools_model: Tokenizer) -> None:
    limits = Limits(max_requests=1, max_body_bytes=300)
    async with chatting(tools_model, limits=limits) as one, a_client(one) as client:
        with pytest.raises(anthropic.ContentTooLargeError) as large:
            await client.messages.create(**ASKED, system="x" * 300)
        assert large.value.body["error"]["type"] == "request_too_large"
        one.leader.allow(1)
        stream = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.RateLimitError) as many:
            await client.messages.create(**ASKED)
        assert many.value.type == "rate_limit_error"
        one.leader.allow(None)
        async for _ in stream:
            pass


async def test_a_model_without_tools(gateway: Harness) -> None:
    response = await gateway.http.post("/v1/messages", json=ASKED | {"tools": [TOOL]})
    assert "teaches no form of tool calls" in response.json()["error"]["message"]


# Laws

MARKERS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    '{"a": 1}',
    "}",
    "\n",
    "x",
]
FORMATS = st.sampled_from([*TOOL_FORMATS, None])
TEXTS = st.lists(st.sampled_from(MARKERS) | st.text(max_size=3), max_size=12).map("".join)


def whole(parsing: Parsing, text: str) -> list[tuple[str, str, str]]:
    blocks = Blocks(parsing, "call", "an answer")
    list(blocks.push(text, ends=True))
    return [told(block) for block in blocks.all]


def told(block: Block) -> tuple[str, str, str]:
    return block.kind, block.name, block.text


@settings(deadline=None, max_examples=share(600))
@given(text=TEXTS, cuts=st.lists(st.integers(0, 80)), tools=FORMATS, most=st.sampled_from([None, 1]), data=st.data())
def test_blocks_are_the_same_whole_and_streamed(
    text: str, cuts: list[int], tools: Any, most: int | None, data: st.DataObject
) -> None:
    if tools is not None:  # pieces of this family's own calls
        family = [tools.block_begin, tools.call_begin, tools.separator, tools.call_end, tools.block_end, *MARKERS]
        text = "".join(data.draw(st.lists(st.sampled_from(family), max_size=14)))
    parsing = Parsing(tools, reasoning=data.draw(st.sampled_from([None, *REASONING_FORMATS])), most_calls=most)
    streamed = Blocks(parsing, "call", "an answer")
    open_block: Block | None = None
    finished: list[tuple[str, str, str]] = []
    grown = ""
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for start, end in zip(places, [*places[1:], None], strict=True):
        for step in streamed.push(text[start:end], ends=end is None):
            match step:
                case Begins(block):
                    assert open_block is None
                    assert block.index == len(finished)
                    assert block.text == ""
                    open_block, grown = block, ""
                case Grows(block, more):
                    assert block is open_block
                    assert more
                    grown += more
                case Ends(block):
                    assert block is open_block
                    assert grown == block.text
                    finished.append(told(block))
                    open_block = None
    assert open_block is None
    assert finished == whole(parsing, text)
    assert all(first[0] != second[0] or first[0] == "call" for first, second in pairwise(finished))


def test_what_is_said_between_calls_is_a_block_of_its_own() -> None:
    parsing = Parsing(tool_format("hermes"))
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert whole(parsing, f"a{call}b{call}\nc") == [
        ("text", "", "a"),
        ("call", "f", "{}"),
        ("text", "", "b"),
        ("call", "f", "{}"),
        ("text", "", "\nc"),
    ]
