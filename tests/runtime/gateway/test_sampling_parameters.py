"""Sampling parameters on their way from a body to the last stage, and those that the gateway keeps itself."""

import time
from pathlib import Path
from typing import Any

import pytest

from strata_planner.contract.frames import LogitRules, Sampling
from strata_runtime.gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness, TrialsHere, a_gateway, a_leader, scripted
from tests.runtime.gateway.models import CHAT_TEMPLATE, write_model_folder

END = 1  # of the tests' model


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_p": 0.2}, Sampling(seed=7, min_p=0.2)),
        ({"presence_penalty": 1.5}, Sampling(seed=7, rules=LogitRules(presence_penalty=1.5))),
        ({"frequency_penalty": -2}, Sampling(seed=7, rules=LogitRules(frequency_penalty=-2.0))),
        ({"repetition_penalty": 1.2}, Sampling(seed=7, rules=LogitRules(repetition_penalty=1.2))),
        ({"logit_bias": {"5": -100, "7": 2.5}}, Sampling(seed=7, rules=LogitRules(bias=((5, -100.0), (7, 2.5))))),
        ({"min_tokens": 3}, Sampling(seed=7, rules=LogitRules(min_tokens=3, ends=(END,)))),
        (
            {"min_tokens": 3, "stop_token_ids": [9], "ignore_eos": True},
            Sampling(seed=7, rules=LogitRules(min_tokens=3, ends=(9,))),
        ),
        (
            {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "min_tokens": 0},
            Sampling(seed=7),
        ),
        ({"presence_penalty": None, "logit_bias": None, "min_p": None, "bad_words": None}, Sampling(seed=7)),
    ],
)
async def test_what_a_body_asks_for_reaches_the_last_stage(
    gateway: Harness, leader: FakeLeader, fields: dict[str, Any], expected: Sampling
) -> None:
    for ask in (gateway.complete, gateway.chat):
        assert (await ask(max_tokens=4, seed=7, **fields)).status_code == 200
        assert leader.submits[-1].sampling == expected


async def test_bad_words_are_found_at_the_beginning_and_behind_a_space(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    await gateway.complete(max_tokens=1, bad_words=["fox", " fox", "été"])
    rules = leader.submits[-1].sampling.rules
    assert rules is not None
    assert {tokenizer.decode(word) for word in rules.bad_words} == {"fox", " fox", "été", " été"}
    assert len(rules.bad_words) == 4


REFUSED = [
    ({"presence_penalty": 2.1}, "presence_penalty", "<= 2.0"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "got `str`"),
    ({"repetition_penalty": 0}, "repetition_penalty", "> 0.0"),
    ({"min_p": 1.01}, "min_p", "<= 1.0"),
    ({"min_tokens": -1}, "min_tokens", ">= 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens=4"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "<= 100.0"),
    ({"logit_bias": {"fox": 1}}, "logit_bias", "expected"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias", "vocabulary ends"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "<= 1024"),
    ({"logit_bias": [5]}, "logit_bias", "got `array`"),
    ({"bad_words": [""]}, "bad_words.0", ">= 1"),
    ({"bad_words": ["fox"] * 129}, "bad_words", "<= 128"),
    ({"bad_words": ["x y " * 100]}, "bad_words.0", "1 to 64 tokens"),
    ({"skip_special_tokens": 1}, "skip_special_tokens", "got `int`"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
async def test_what_cannot_be_is_refused_by_name(
    gateway: Harness, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await gateway.complete(**{"max_tokens": 8} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_a_stop_string_within_the_least_length_is_no_end(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    text = "hello world, hello world"
    leader.model = scripted(tokenizer, text)
    least = len(tokenizer.encode("hello world,"))
    for minimum, expected in ((0, "hello"), (least, "hello world, hello")):
        answer = await gateway.complete(max_tokens=100, stop=" world", min_tokens=minimum)
        assert answer.json()["choices"][0]["text"] == expected


async def test_special_tokens_are_text_where_they_are_asked_for(
    gateway: Harness, leader: FakeLeader, tokenizer: Tokenizer
) -> None:
    leader.model = lambda _, index: [*tokenizer.encode("a"), 0, *tokenizer.encode("b"), END][index]
    for skip, expected in ((True, "ab"), (False, "a<s>b")):
        answer = await gateway.complete(max_tokens=100, skip_special_tokens=skip)
        assert answer.json()["choices"][0]["text"] == expected


TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}<tool_call>arguments</tool_call>{% endfor %}{% endif %}"
    + CHAT_TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.arguments.a }}]{% endfor %}"
    )
    + "{{ mood }}{{ reasoning_effort }}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_model_folder(tmp_path_factory.mktemp("tools"), chat_template=TEMPLATE))


def prompt_of(leader: FakeLeader, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(leader.submits[-1].prompt)


async def test_a_template_gets_what_the_body_has_for_it(with_tools: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "so",
            "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a": 5}'}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "six"},
    ]
    async with a_gateway(with_tools) as gateway, a_leader(scripted(with_tools, "ok")) as leader:
        await gateway.connect(leader)
        answer = await gateway.chat(
            messages=messages, tools=TOOLS, chat_template_kwargs={"mood": "calm"}, reasoning_effort="low"
        )
        assert answer.status_code == 200, answer.text
        shown = prompt_of(leader, with_tools)
        assert shown == "add<tool_call>arguments</tool_call><|user|>hi<|assistant|>[5]<|tool|>six<|assistant|>calmlow"
        await gateway.chat(messages=messages, tools=TOOLS, tool_choice="none")
        assert prompt_of(leader, with_tools).startswith("<|user|>hi")
        last = [*messages, {"role": "assistant", "content": "It is"}]
        await gateway.chat(messages=last, continue_final_message=True)
        assert prompt_of(leader, with_tools).endswith("<|assistant|>It is")


@pytest.mark.parametrize(
    ("fields", "calls", "content", "reason"),
    [
        ({}, 2, "Now ", "tool_calls"),
        ({"parallel_tool_calls": False}, 1, "Now ", "tool_calls"),
        ({"tool_choice": "none"}, 0, f"Now {CALL}\n{CALL}", "stop"),
    ],
)
async def test_calls_are_no_text(
    with_tools: Tokenizer, fields: dict[str, Any], calls: int, content: str, reason: str
) -> None:
    text = f"Now {CALL}\n{CALL}"
    async with a_gateway(with_tools) as gateway, a_leader(scripted(with_tools, text)) as leader:
        await gateway.connect(leader)
        [choice] = (await gateway.chat(tools=TOOLS, **fields)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
        made = choice["message"].get("tool_calls", [])
        assert [each["function"] for each in made] == [{"name": "add", "arguments": '{"a": 1}'}] * calls
        assert len({each["id"] for each in made}) == calls


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.function", "required"),
        ({"tools": [TOOLS[0] | {"type": "custom"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "letters"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
            "tools.0.function.parameters",
            "object",
        ),
        ({"tools": TOOLS * 2}, "tools", "two functions of one name"),
        ({"tools": TOOLS * 513}, "tools", "513 tools; 512 at most"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "'required'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "the tools are 'add'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "have not",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
                "tool_choice": "required",
            },
            "tools",
            "are an object",
        ),
        (
            {"tools": TOOLS, "structured_outputs": {"structural_tag": {"structures": []}}},
            "structured_outputs.structural_tag",
            "must have a format field",
        ),
        (
            {"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}},
            "structured_outputs.grammar",
            "beside tools",
        ),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template", "leave it out"),
        ({"chat_template_kwargs": {"eos_token": "x" * 9999}}, "chat_template_kwargs.eos_token", "leave it out"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", "leave it out"),
        ({"chat_template_kwargs": {"mood": "x" * 17000}}, "chat_template_kwargs", "16384 at most"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "send one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "required"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "cut off",
        ),
    ],
)
async def test_tools_that_cannot_be_are_refused_by_name(
    with_tools: Tokenizer, fields: dict[str, Any], param: str, words: str
) -> None:
    async with a_gateway(with_tools) as gateway, a_leader(scripted(with_tools, "ok")) as leader:
        await gateway.connect(leader)
        answer = await gateway.chat(**fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert words in error["message"]


async def test_a_template_that_teaches_no_calls_takes_no_tools(gateway: Harness) -> None:
    for fields, param in (({"tools": TOOLS}, "tools"), ({"reasoning_effort": "low"}, "reasoning_effort")):
        answer = await gateway.chat(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await gateway.chat(tools=TOOLS, tool_choice="none", max_tokens=1)).status_code == 200


async def test_a_call_that_must_come_is_held_to_its_schema(with_tools: Tokenizer, tmp_path: Path) -> None:
    trials = TrialsHere(with_tools)
    async with a_gateway(with_tools, trials=trials) as gateway, a_leader(scripted(with_tools, CALL)) as leader:
        await gateway.connect(leader)
        named = {"type": "function", "function": {"name": "add"}}
        for choice in ("required", named):
            answer = await gateway.chat(tools=TOOLS, tool_choice=choice)
            assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
            rules = leader.submits[-1].sampling.rules
            assert rules is not None
            assert rules.grammar is not None
            assert rules.grammar.kind == "structural_tag"
            assert ('"star"' in rules.grammar.text) == (choice == "required"), "a named one comes once"


async def test_an_answer_ends_with_its_deadline(gateway: Harness, leader: FakeLeader) -> None:
    """Before its first token with a status, in the midst of a stream with an event; the leader is told."""
    leader.allow(0)
    answer = await gateway.complete(max_tokens=100, deadline_seconds=0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "is over with 0 tokens" in answer.json()["error"]["message"]
    leader.allow(3)
    stream = await gateway.complete(max_tokens=100, deadline_seconds=3, stream=True)
    lines = [line for line in stream.text.splitlines() if line]
    assert (stream.status_code, "is over with 3 tokens" in lines[-1]) == (200, True), lines[-1]
    await leader.until(lambda: len(leader.aborts) == 2)


async def test_the_leader_hears_of_deadlines(gateway: Harness, leader: FakeLeader) -> None:
    now = time.time()
    for fields, later in (({}, 600), ({"deadline_seconds": 5}, 5), ({"deadline_seconds": 5000}, 600)):
        await gateway.complete(max_tokens=1, **fields)
        assert leader.submits[-1].deadline == pytest.approx(now + later, abs=30)
