"""Which tool calls a chat template asks for, and the grammars that force them."""
# ruff: noqa: RUF001 (DeepSeek's markers have fullwidth bars)

import json
from functools import cache
from typing import Literal

import pytest
import xgrammar

from strata_runtime.gateway.text import tool_formats
from strata_runtime.gateway.text.tool_formats import TOOL_FORMAT_NAMES, structural_tag, tool_format

# What tells them apart in the published templates.
TEMPLATES = {
    "Qwen2.5, Qwen3": (
        (
            "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
            '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
        ),
        "hermes",
    ),
    "Qwen3-Coder": (
        (
            "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter>\\nvalue_1\\n</parameter>\\n"
            "</function>\\n</tool_call>{%- for args_name, args_value in tool_call.arguments|items %}"
        ),
        "qwen3_coder",
    ),
    "GLM-4.5": (
        (
            "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>\\n"
            "</tool_call>{% set _args = tc.arguments %}"
        ),
        None,
    ),
    "Llama 3.1": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        "llama3",
    ),
    "Mistral 7B v0.3": ('{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}', "mistral"),
    "Devstral": ("{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}", "mistral_v11"),
    "DeepSeek-V3": (
        (
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] "
            "+ '\\n' + '```json' + '\\n'}}"
        ),
        "deepseek_v3",
    ),
    "DeepSeek-V3.1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'}}",
        "deepseek_v31",
    ),
    "no tools": ("{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}", None),
}

TOOLS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a", "note"],
    },
    "now": {"type": "object", "properties": {}},
    "guess": {},
}
# The call of `add` with 1 and "x", of `now`, and of both, as the published templates write them.
WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "x"}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "x"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        ),
    ),
    "qwen3_coder": (
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\nx\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
    ),
    "llama3": (
        '{"name": "add", "parameters": {"a": 1, "note": "x"}}',
        '{"name": "now", "parameters": {}}',
        '{"name": "add", "parameters": {"a": 1, "note": "x"}}; {"name": "now", "parameters": {}}',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "note": "x"}}]',
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "note": "x"}}, {"name": "now", "arguments": {}}]',
    ),
    "mistral_v11": (
        '[TOOL_CALLS]add[ARGS]{"a": 1, "note": "x"}',
        "[TOOL_CALLS]now[ARGS]{}",
        '[TOOL_CALLS]add[ARGS]{"a": 1, "note": "x"}[TOOL_CALLS]now[ARGS]{}',
    ),
    "deepseek_v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "note": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1, "note": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek_v31": (
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "note": "x"}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>"
        ),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "note": "x"}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
}


@cache
def grammar(name: str, calls: Literal["one", "some"]) -> xgrammar.CompiledGrammar:
    vocabulary = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"</s>"], stop_token_ids=[256])
    tag = structural_tag(tool_format(name), TOOLS, calls=calls)
    return xgrammar.GrammarCompiler(vocabulary).compile_structural_tag(json.dumps(tag))


def accepts(name: str, calls: Literal["one", "some"], text: str) -> bool:
    """Whether the answer may be this text and end there."""
    matcher = xgrammar.GrammarMatcher(grammar(name, calls))
    return matcher.accept_string(text.encode()) and matcher.accept_token(256)


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_family_is_told_from_the_chat_template(model: str) -> None:
    template, name = TEMPLATES[model]
    found = tool_formats.detect(template)
    assert (found.name if found else None) == name


def test_every_family_has_examples_and_a_name() -> None:
    assert set(WRITTEN) == set(TOOL_FORMAT_NAMES)
    assert [tool_format(name).name for name in TOOL_FORMAT_NAMES] == list(TOOL_FORMAT_NAMES)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_grammar_accepts_calls_as_the_family_writes_them(name: str) -> None:
    add, now, both = WRITTEN[name]
    assert accepts(name, "one", add)
    assert accepts(name, "one", now)
    assert accepts(name, "some", add)
    assert accepts(name, "some", both)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_grammar_refuses_everything_else(name: str) -> None:
    add, _, both = WRITTEN[name]
    assert not accepts(name, "one", both)
    for calls in ("one", "some"):
        assert not accepts(name, calls, "")
        assert not accepts(name, calls, "I add. " + add)
        assert not accepts(name, calls, add + " Done.")
        assert not accepts(name, calls, add.replace("add", "subtract"))
        assert not accepts(name, calls, add.replace("1", "one"))
        assert not accepts(name, calls, add.replace("note", "remark"))


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"qwen3_coder"}))
def test_arguments_are_an_object_where_the_schema_does_not_say(name: str) -> None:
    now = WRITTEN[name][1].replace("now", "guess")
    assert accepts(name, "one", now.replace("{}", '{"anything": [1]}'))
    assert not accepts(name, "one", now.replace("{}", "1"))
