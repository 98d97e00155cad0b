"""POST /v1/completions and /v1/chat/completions: answers, whole and streamed, in OpenAI's shapes."""

import json
from typing import Any

import httpx
import pytest

from strata_runtime.gateway.http.shapes import ChatShape, CompletionShape
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, scripted

FOX = "the quick brown fox jumps"


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of server-sent events; the end marker must be there, last and once."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_whole_completion(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, FOX)
    answer = (await gateway.complete(max_tokens=100, temperature=0)).json()
    tokens = len(tokenizer.encode(FOX)) + 1
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": FOX, "logprobs": None, "finish_reason": "stop"}]
    prompt = len(tokenizer.encode("hello"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_usage_tells_what_was_cached(gateway: Harness, leader: FakeLeader) -> None:
    """Once for each prompt: further choices find what the first one has computed."""
    leader.found = 2
    answer = (await gateway.complete(prompt=[[5, 6, 7], [8, 9, 10]], n=3, max_tokens=2)).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    streamed = events_of(await gateway.complete(max_tokens=2, stream=True, stream_options={"include_usage": True}))
    assert streamed[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_priority_and_salt_reach_the_leader(gateway: Harness, leader: FakeLeader) -> None:
    await gateway.complete(max_tokens=1)
    await gateway.complete(max_tokens=1, priority=3, cache_salt="tenant a")
    assert [(each.priority, each.salt) for each in leader.submits] == [(0, ""), (3, "tenant a")]


async def test_streamed_text_equals_whole_text(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, "\u00e9t\u00e9 \u4e2d\u6587 \U0001f99d.")
    whole = (await gateway.complete(max_tokens=100)).json()
    streamed = events_of(await gateway.complete(max_tokens=100, stream=True, stream_options={"include_usage": True}))
    *chunks, last = streamed
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in streamed}) == 1


async def test_max_tokens_ends_with_length(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    answer = (await gateway.complete(max_tokens=5)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    prompt = tokenizer.encode("hello")
    assert answer["choices"][0]["text"] == tokenizer.decode([leader.model(prompt, i) for i in range(5)])


async def test_openai_default_of_sixteen_tokens(gateway: Harness) -> None:
    assert (await gateway.complete()).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        pytest.param(["one", "two"], 2, id="strings"),
        pytest.param([5, 6, 7], 1, id="token ids"),
        pytest.param([[5, 6], [7]], 2, id="lists of token ids"),
    ],
)
async def test_prompts_of_every_shape(gateway: Harness, leader: FakeLeader, prompt: Any, answers: int) -> None:
    answer = (await gateway.complete(prompt=prompt, n=2, max_tokens=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * answers))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[::2] == texts[1::2]  # this leader's answer depends on the prompt alone
    assert len(set(texts)) == answers
    assert answer["usage"]["prompt_tokens"] == sum(len(submit.prompt) for submit in leader.submits[::2])


async def test_choices_draw_with_seeds_of_their_own(gateway: Harness, leader: FakeLeader) -> None:
    await gateway.complete(n=3, seed=42, max_tokens=1)
    await gateway.complete(n=3, seed=42, max_tokens=1)
    seeds = [submit.sampling.seed for submit in leader.submits]
    assert seeds[0] == 42
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]


async def test_parameters_reach_the_leader(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    await gateway.complete(temperature=0.5, top_p=0.9, top_k=7, max_tokens=3, stop_token_ids=[9])
    await gateway.complete(ignore_eos=True, top_k=-1, max_tokens=3)
    first, second = leader.submits
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 7)
    assert (first.max_tokens, first.stop_tokens) == (3, [*tokenizer.stop_tokens, 9])
    assert (second.sampling.top_k, second.stop_tokens) == (0, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_is_not_shown(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer, *, stream: bool
) -> None:
    leader.model = scripted(tokenizer, FOX)
    leader.allow(len(tokenizer.encode("the quick brown")) + 1)  # it would go on
    response = await gateway.complete(max_tokens=100, stop=["row", "never"], stream=stream)
    if stream:
        chunks = [event["choices"][0] for event in events_of(response)]
        text, reason = "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("the quick b", "stop")
    await leader.until(lambda: leader.aborts == [leader.submits[0].request])


async def test_echo_repeats_the_prompt(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, " world")
    answer = (await gateway.complete(echo=True)).json()
    assert answer["choices"][0]["text"] == "hello world"
    streamed = events_of(await gateway.complete(echo=True, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == "hello world"


async def test_completion_log_probabilities(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, FOX)
    logprobs = (await gateway.complete(max_tokens=100, logprobs=2)).json()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == FOX
    assert set(logprobs["token_logprobs"]) == {-0.25}
    for token, offset, top in zip(logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True):
        assert FOX[offset:].startswith(token)
        assert top[token] == -0.25
        assert len(top) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_log_probabilities(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer, *, stream: bool
) -> None:
    text = "fox \U0001f99d"
    leader.model = scripted(tokenizer, text)
    response = await gateway.chat(logprobs=True, top_logprobs=2, stream=stream)
    choices = [event["choices"][0] for event in events_of(response)] if stream else response.json()["choices"]
    content = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == text
    assert all(one["top_logprobs"][0]["token"] == one["token"] for one in content)
    assert {len(one["top_logprobs"]) for one in content} == {2}


@pytest.mark.parametrize("shape", [CompletionShape, ChatShape])
async def test_log_probabilities_are_written_as_they_come(
    gateway: Harness, tokenizer: Tokenizer, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them is left for the end of a whole answer, and it has what streams have."""
    asked: list[int] = []
    at_the_end: list[int] = []
    token_bytes, whole = tokenizer.token_bytes, shape.whole
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token: asked.append(token) or token_bytes(token))

    def counted(*arguments: Any) -> Any:
        before = len(asked)
        choice = whole(*arguments)
        at_the_end.append(len(asked) - before)
        return choice

    monkeypatch.setattr(shape, "whole", counted)
    ask, top = (
        (gateway.complete, {"logprobs": 2})
        if shape is CompletionShape
        else (gateway.chat, {"logprobs": True, "top_logprobs": 2})
    )
    body = {**top, "max_tokens": 20, "n": 2, "ignore_eos": True}
    choices = (await ask(**body)).json()["choices"]
    assert at_the_end == [0, 0]
    assert len(asked) >= 2 * 20 * 3
    streamed = [event["choices"][0] for event in events_of(await ask(**body, stream=True))]
    for index, choice in enumerate(choices):
        own = [one["logprobs"] for one in streamed if one["index"] == index and one["logprobs"]]
        for name in set(own[0]) - {"refusal"}:
            assert choice["logprobs"][name] == [value for one in own for value in one[name]]


async def test_a_whole_chat_answer(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, FOX)
    answer = (await gateway.chat()).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": FOX, "refusal": None}
    submit = leader.submits[0]
    assert submit.prompt == tokenizer.encode("<|user|>hello\n<|assistant|>")
    assert submit.max_tokens == 512 - len(submit.prompt)  # all that is left


async def test_a_streamed_chat_answer(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    leader.model = scripted(tokenizer, FOX)
    deltas = [event["choices"][0]["delta"] for event in events_of(await gateway.chat(stream=True))]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == FOX


async def test_messages_of_every_shape(gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer) -> None:
    empty = {"refusal": None, "tool_calls": None, "annotations": [], "provider_specific_fields": {"refusal": None}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": "c", **empty},
        {"role": "user", "content": "d"},
    ]
    await gateway.chat(messages=messages, max_completion_tokens=1)
    expected = "<|system|>be brief\n<|user|>ab\n<|assistant|>c\n<|user|>d\n<|assistant|>"
    assert leader.submits[0].prompt == tokenizer.encode(expected)


async def test_the_models_that_are_served(gateway: Harness) -> None:
    (model,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)
    assert (await gateway.http.get("/v1/models/tiny")).json() == model
