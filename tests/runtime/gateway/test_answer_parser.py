"""Answers of every family, whole; and that the pieces they come in make no difference."""
# ruff: noqa: RUF001 (DeepSeek's markers have fullwidth bars)

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.gateway.text.answer_parser import AnswerParser, Parts
from strata_runtime.gateway.text.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format
from strata_runtime.gateway.text.tool_formats import (
    TOOL_FORMAT_NAMES,
    TOOL_FORMATS,
    CallSyntax,
    ToolFormat,
    tool_format,
)
from tests.laws import share

THINK = reasoning_format("think")
SCHEMAS = {"f": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}


@dataclass
class Answer:
    """All parts of an answer put together; calls are (name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, parts: Parts) -> None:
        self.content += parts.content
        self.reasoning += parts.reasoning
        for delta in parts.calls:
            if delta.index == len(self.calls):
                assert delta.id == f"call_{delta.index}"
                assert delta.name
                self.calls.append((delta.name, delta.arguments))
            else:
                assert delta.index == len(self.calls) - 1
                assert delta.id is None
                assert delta.name is None
                name, arguments = self.calls[-1]
                self.calls[-1] = (name, arguments + delta.arguments)


def a_parser(
    tools: ToolFormat | None = None,
    reasoning: ReasoningFormat | None = None,
    *,
    starts_in_reasoning: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] = SCHEMAS,
) -> AnswerParser:
    ids = count()
    return AnswerParser(
        tools,
        reasoning,
        starts_in_reasoning=starts_in_reasoning,
        new_id=lambda: f"call_{next(ids)}",
        schemas=schemas,
    )


def answer(parser: AnswerParser, pieces: Iterable[str]) -> Answer:
    whole = Answer()
    for piece in pieces:
        whole.add(parser.push(piece))
    whole.add(parser.flush())
    assert parser.call_count == len(whole.calls)
    assert parser.called == bool(whole.calls)
    return whole


def both_ways(make: Callable[[], AnswerParser], text: str) -> Answer:
    """The answer, the same at once and by single characters."""
    whole = answer(make(), [text])
    assert answer(make(), text) == whole
    return whole


F, G = ("f", '{"n": 1, "s": "x"}'), ("g", "{}")
NESTED = (
    "f",
    '{ "s": "a \\"quoted\\" }]\\\\",\n "more": [{"x": [1, {}]}, "</tool_call>[TOOL_CALLS]<｜tool▁call▁end｜>"] }',
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1, "s": "x"}}\n</tool_call>'
V3, V3_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
V3_CALL = V3_SEP + 'f\n```json\n{"n": 1, "s": "x"}\n```<｜tool▁call▁end｜>'
V31_CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1, "s": "x"}<｜tool▁call▁end｜>'
CODER_CALL = (
    "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\nx\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA_CALL = '{"name": "f", "parameters": {"n": 1, "s": "x"}}'

WELL_FORMED: dict[str, dict[str, tuple[str, Answer]]] = {
    "hermes": {
        "one call": (CALL, Answer(calls=[F])),
        "two calls": (CALL + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', Answer(calls=[F, G])),
        "content before": ("I see.\n" + CALL, Answer("I see.\n", calls=[F])),
        "white space before": ("\n\n" + CALL + "\n", Answer(calls=[F])),
        "content behind": (CALL + "\nDone.", Answer("\nDone.", calls=[F])),
        "content between": (f"{CALL}and{CALL}", Answer("and", calls=[F, F])),
        "nested": (f'<tool_call>{{"name": "f", "arguments": {NESTED[1]}}}</tool_call>', Answer(calls=[NESTED])),
        "arguments first": ('<tool_call>{"arguments": {"n": 1, "s": "x"}, "name": "f"}</tool_call>', Answer(calls=[F])),
        "other keys": (
            '<tool_call>{"why": ["f"], "name": "f", "arguments": {"n": 1, "s": "x"}, "id": "7"}</tool_call>',
            Answer(calls=[F]),
        ),
        "arguments in a string": (
            '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1, \\"s\\": \\"x\\"}"}</tool_call>',
            Answer(calls=[F]),
        ),
        "no arguments": ('<tool_call>{"name": "g"}</tool_call>', Answer(calls=[G])),
        "null for arguments": ('<tool_call>{"name": "g", "arguments": null}</tool_call>', Answer(calls=[G])),
        "escaped name": ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', Answer(calls=[("f", "{}")])),
    },
    "llama3": {
        "one call": (LLAMA_CALL, Answer(calls=[F])),
        "two calls": (LLAMA_CALL + '; {"name": "g", "parameters": {}}', Answer(calls=[F, G])),
        "python tag": ("<|python_tag|>" + LLAMA_CALL, Answer(calls=[F])),
        "the other key": (LLAMA_CALL.replace("parameters", "arguments"), Answer(calls=[F])),
        "with a type": ('{"type": "function", "name": "g", "parameters": {}}', Answer(calls=[G])),
        "content behind": (LLAMA_CALL + "\n\nDone.", Answer("\n\nDone.", calls=[F])),
        "nested": (f'{{"name": "f", "parameters": {NESTED[1]}}}', Answer(calls=[NESTED])),
        "content before": ("I see. " + LLAMA_CALL, Answer("I see. " + LLAMA_CALL)),
        "JSON that answers": ('{"answer": {"name": "f"}}', Answer('{"answer": {"name": "f"}}')),
        "JSON with a name": ('{"name": "Ada", "born": 1815}', Answer('{"name": "Ada", "born": 1815}')),
        "only a name": ('{"name": "Ada"}', Answer('{"name": "Ada"}')),
        "code": ("<|python_tag|>print(1)", Answer("<|python_tag|>print(1)")),
    },
    "mistral": {
        "one call": ('[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1, "s": "x"}}]', Answer(calls=[F])),
        "two calls": (
            '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1, "s": "x"}}, {"name": "g", "arguments": {}, "id": "a1"}]',
            Answer(calls=[F, G]),
        ),
        "content before": ('Yes.[TOOL_CALLS] [{"name": "g", "arguments": {}}]', Answer("Yes.", calls=[G])),
        "nested": (f'[TOOL_CALLS][{{"name": "f", "arguments": {NESTED[1]}}}]', Answer(calls=[NESTED])),
    },
    "mistral_v11": {
        "one call": ('[TOOL_CALLS]f[ARGS]{"n": 1, "s": "x"}', Answer(calls=[F])),
        "two calls": ('[TOOL_CALLS]f[ARGS]{"n": 1, "s": "x"}[TOOL_CALLS]g[ARGS]{}', Answer(calls=[F, G])),
        "no marker between": ('[TOOL_CALLS]f{"n": 1, "s": "x"}[TOOL_CALLS]g{}', Answer(calls=[F, G])),
        "the model's id": ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"n": 1, "s": "x"}', Answer(calls=[F])),
        "content before": ("Yes.[TOOL_CALLS]g[ARGS]{}", Answer("Yes.", calls=[G])),
        "nested": (f"[TOOL_CALLS]f[ARGS]{NESTED[1]}", Answer(calls=[NESTED])),
    },
    "deepseek_v3": {
        "one call": (f"{V3}{V3_CALL}<｜tool▁calls▁end｜>", Answer(calls=[F])),
        "two calls": (
            f"{V3}{V3_CALL}\n{V3_SEP}g\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            Answer(calls=[F, G]),
        ),
        "content before": (f"Yes.{V3}{V3_CALL}<｜tool▁calls▁end｜>", Answer("Yes.", calls=[F])),
        "nested": (f"{V3}{V3_SEP}f\n```json\n{NESTED[1]}\n```<｜tool▁call▁end｜>", Answer(calls=[NESTED])),
    },
    "deepseek_v31": {
        "one call": (f"{V3}{V31_CALL}<｜tool▁calls▁end｜>", Answer(calls=[F])),
        "two calls": (
            f"{V3}{V31_CALL}<｜tool▁call▁begin｜>g<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            Answer(calls=[F, G]),
        ),
        "content before": (f"Yes.{V3}{V31_CALL}<｜tool▁calls▁end｜>", Answer("Yes.", calls=[F])),
        "nested": (f"{V3}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{NESTED[1]}<｜tool▁call▁end｜>", Answer(calls=[NESTED])),
    },
    "qwen3_coder": {
        "one call": (CODER_CALL, Answer(calls=[F])),
        "two calls": (CODER_CALL + "\n<tool_call>\n<function=g>\n</function>\n</tool_call>", Answer(calls=[F, G])),
        "content before": ("I see.\n\n" + CODER_CALL, Answer("I see.\n\n", calls=[F])),
        "in one line": (
            "<tool_call><function=f><parameter=n>1</parameter><parameter=s>x</parameter></function></tool_call>",
            Answer(calls=[F]),
        ),
        "nested": (
            '<tool_call><function=g><parameter=o>\n{"s": ["\\"</function>"]}\n</parameter></function></tool_call>',
            Answer(calls=[("g", '{"o": {"s": ["\\"</function>"]}}')]),
        ),
        "strings stay text": (
            '<tool_call><function=f><parameter=s>\n1 "<b>"\n\n</parameter></function></tool_call>',
            Answer(calls=[("f", '{"s": "1 \\"<b>\\"\\n"}')]),
        ),
        "no integer after all": (
            "<tool_call><function=f><parameter=n>one</parameter></function></tool_call>",
            Answer(calls=[("f", '{"n": "one"}')]),
        ),
        "Python's literals": (
            "<tool_call><function=g><parameter=t>True</parameter><parameter=n>None</parameter></function></tool_call>",
            Answer(calls=[("g", '{"t": true, "n": null}')]),
        ),
    },
}

# What goes wrong before the arguments begin is content; what goes wrong later leaves a call.
MALFORMED: dict[str, tuple[str, str, Answer]] = {
    "marker in prose": ("hermes", "The tag <tool_call> begins one.", Answer("The tag <tool_call> begins one.")),
    "no JSON": ("hermes", "<tool_call>f(1)</tool_call>", Answer("<tool_call>f(1)</tool_call>")),
    "JSON, no call": ("hermes", '<tool_call>{"a": 1}</tool_call>', Answer('<tool_call>{"a": 1}</tool_call>')),
    "empty name": (
        "hermes",
        '<tool_call>{"name": "", "arguments": {}}',
        Answer('<tool_call>{"name": "", "arguments": {}}'),
    ),
    "half a surrogate": (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        Answer('<tool_call>{"name": "\\ud800", "arguments": {}}'),
    ),
    "arguments no object": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        Answer('<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ),
    "a call behind a false begin": ("hermes", "<tool_call> " + CALL, Answer("<tool_call> ", calls=[F])),
    "an end without a begin": ("hermes", "a </tool_call> b", Answer("a </tool_call> b")),
    "cut in the marker": ("hermes", "Yes <tool_c", Answer("Yes <tool_c")),
    "cut before the arguments": (
        "hermes",
        '<tool_call>\n{"name": "f", "arg',
        Answer('<tool_call>\n{"name": "f", "arg'),
    ),
    "cut in the arguments": ("hermes", CALL.split(': "x', maxsplit=1)[0], Answer(calls=[("f", '{"n": 1, "s"')])),
    "cut in the end": ("hermes", CALL[:-4], Answer(calls=[F])),
    "cut before the end": ("hermes", CALL[:-13], Answer(calls=[F])),
    "brace missing": ("hermes", CALL.replace("}}", "}"), Answer(calls=[F])),
    "brace too much": ("hermes", CALL.replace("}}", "}}}") + "Yes", Answer("}\nYes", calls=[F])),
    "arguments unclosed": (
        "hermes",
        CALL.replace("}}", "") + CALL,
        Answer(calls=[("f", '{"n": 1, "s": "x"\n'), F]),
    ),
    "arguments not JSON": (
        "hermes",
        """<tool_call>{"name": "f", "arguments": {'n': 1}}</tool_call>Yes""",
        Answer("Yes", calls=[("f", "{'n': 1}}")]),
    ),
    "end missing": ("hermes", CALL.replace("</tool_call>", "") + CALL, Answer(calls=[F, F])),
    "Llama, arguments not JSON": ("llama3", '{"name": "f", "parameters": {x}', Answer(calls=[("f", "{x}")])),
    "Llama, brackets mismatch": (
        "llama3",
        '{"name": "f", "parameters": {"n": [}} x',
        Answer(calls=[("f", '{"n": [}} x')]),
    ),
    "Llama, cut between calls": ("llama3", LLAMA_CALL + '; {"na', Answer('; {"na', calls=[F])),
    "Mistral, no list": ("mistral", "[TOOL_CALLS]f{}", Answer("[TOOL_CALLS]f{}")),
    "Mistral, list cut": ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}', Answer(calls=[G])),
    "Mistral, text in the list": (
        "mistral",
        '[TOOL_CALLS][{"name": "g", "arguments": {}}, oh',
        Answer(", oh", calls=[G]),
    ),
    "Mistral v11, no arguments": ("mistral_v11", "[TOOL_CALLS]f[ARGS]", Answer("[TOOL_CALLS]f[ARGS]")),
    "DeepSeek, no call in the block": ("deepseek_v31", f"{V3}f", Answer(f"{V3}f")),
    "DeepSeek, cut": ("deepseek_v3", f"{V3}{V3_SEP}f\n```json\n" + '{"n": 1', Answer(calls=[("f", '{"n": 1')])),
    "DeepSeek, cut in an end": ("deepseek_v3", f"{V3}{V3_CALL[:-2]}", Answer(calls=[F])),
    "DeepSeek, cut in the block's end": ("deepseek_v31", f"{V3}{V31_CALL}<｜tool▁calls", Answer(calls=[F])),
    "Coder, cut in a value": (
        "qwen3_coder",
        CODER_CALL.split("\n</parameter>\n</f", maxsplit=1)[0],
        Answer(calls=[("f", '{"n": 1, "s": "x')]),
    ),
    "Coder, cut between": (
        "qwen3_coder",
        CODER_CALL.split("<parameter=s>", maxsplit=1)[0],
        Answer(calls=[("f", '{"n": 1')]),
    ),
    "Coder, no function": ("qwen3_coder", "<tool_call>\n{}", Answer("<tool_call>\n{}")),
    "Coder, text between": (
        "qwen3_coder",
        CODER_CALL.replace("<parameter=s>", "so <parameter=s>"),
        Answer("so <parameter=s>\nx\n</parameter>\n", calls=[("f", '{"n": 1}')]),
    ),
    "Coder, no parameter": (
        "qwen3_coder",
        "<tool_call><function=g><parameter=\n</function></tool_call>",
        Answer("<parameter=", calls=[G]),
    ),
}

HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
THOUGHTS: dict[str, tuple[str, bool, str, Answer]] = {
    "thought and content": ("think", False, "<think>\nHm.\n</think>\n\nYes.", Answer("Yes.", "\nHm.\n")),
    "begun by the prompt": ("think", True, "Hm.</think>\nYes.", Answer("Yes.", "Hm.")),
    "begun once more": ("think", True, "\n<think>\nHm.</think>Yes.", Answer("Yes.", "\nHm.")),
    "never closed": ("think", False, "<think>Hm. </thi", Answer("", "Hm. </thi")),
    "never closed, by the prompt": ("think", True, " Hm. ", Answer("", " Hm. ")),
    "none": ("think", False, "Yes, <think> is a tag.", Answer("Yes, <think> is a tag.")),
    "closed only": ("think", False, "Yes.</think>", Answer("Yes.</think>")),
    "white space only": ("think", False, " \n", Answer(" \n")),
    "empty content": ("think", False, "<think>Hm.</think>\n\n", Answer("", "Hm.")),
    "indented content": ("think", True, "</think>\n\n  Yes.\n", Answer("  Yes.\n")),
    "call": ("think", True, "Hm.</think>\n\n" + CALL, Answer("", "Hm.", [F])),
    "call in the thought": ("think", True, f"Hm.{CALL}</think>", Answer("", "Hm." + CALL)),
    "content and call": ("think", True, "Hm.</think>\n\nYes.\n" + CALL, Answer("Yes.\n", "Hm.", [F])),
    "Magistral": ("magistral", False, "[THINK]Hm.[/THINK]Yes.", Answer("Yes.", "Hm.")),
    "harmony": ("harmony", False, HARMONY, Answer("Yes.", "Hm.")),
    "harmony, no thought": ("harmony", False, "<|channel|>final<|message|>Yes.", Answer("Yes.")),
    "harmony, two thoughts": (
        "harmony",
        False,
        HARMONY.partition("<|start|>")[0] + "<|start|>assistant" + HARMONY,
        Answer("Yes.", "Hm.Hm."),
    ),
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in WELL_FORMED for case in WELL_FORMED[name]])
def test_a_well_formed_answer(name: str, case: str) -> None:
    text, expected = WELL_FORMED[name][case]
    assert both_ways(lambda: a_parser(tool_format(name)), text) == expected


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_answer(case: str) -> None:
    name, text, expected = MALFORMED[case]
    assert both_ways(lambda: a_parser(tool_format(name)), text) == expected


@pytest.mark.parametrize("case", THOUGHTS)
def test_an_answer_with_thoughts(case: str) -> None:
    name, inside, text, expected = THOUGHTS[case]
    tools, reasoning = tool_format("hermes"), reasoning_format(name)
    assert both_ways(lambda: a_parser(tools, reasoning, starts_in_reasoning=inside), text) == expected


def test_what_cannot_become_anything_else_is_reported_at_once() -> None:
    parser = a_parser(tool_format("hermes"), THINK)
    assert parser.push("<think>Hm").reasoning == "Hm"
    assert parser.push(" </").reasoning == " "
    assert parser.push("think>") == Parts()
    assert parser.push("\n\nYes <").content == "Yes "
    assert parser.push("b> <tool_call>").content == "<b> "
    assert parser.push('{"name": "f", "arguments": ') == Parts()
    first = parser.push('{"s": "a')
    assert [(call.name, call.arguments) for call in first.calls] == [("f", '{"s": "a')]
    assert [call.arguments for call in parser.push("b </tool_call>").calls] == ["b </tool_call>"]
    assert not parser.push('"}').content


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_what_waits_stays_short_however_long_a_call_is(name: str) -> None:
    text, _ = WELL_FORMED[name]["one call"]
    parser = a_parser(tool_format(name))
    for character in text.replace("x", "y<[{" * 2_000):
        parser.push(character)
        assert len(parser._reader._text) <= 60  # the longest marker
    assert parser.call_count == 1


strings = st.text('a"\\{}[]<>`;,\n\u1234', max_size=6)
objects = st.dictionaries(strings, strings | st.integers() | st.lists(strings, max_size=2), max_size=3)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(objects, min_size=1, max_size=3), st.booleans())
def test_calls_are_read_as_they_are_written(calls: list[dict[str, Any]], ascii_only: bool) -> None:  # noqa: FBT001
    for tools in TOOL_FORMATS:
        if tools.syntax is CallSyntax.PARAMETERS:
            continue  # its values are no JSON: see its examples
        pieces = []
        texts = [json.dumps(arguments, ensure_ascii=ascii_only, indent=1) for arguments in calls]
        for text in texts:
            body = f'{{"name": "f", "{tools.arguments_key}": {text}}}'
            pieces.append(body if tools.syntax is CallSyntax.OBJECT else f"f{tools.between}{text}")
        written = tools.separator.join(tools.call_begin + piece + tools.call_end for piece in pieces)
        whole = answer(a_parser(tools), [tools.block_begin + written + tools.block_end])
        assert whole == Answer(calls=[("f", text) for text in texts])


def fragments(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """What makes texts that come close to calls and thoughts, and often are some."""
    known = [" ", "\n", "x", "f", "<", '{"name": "f", "arguments": ', '{"n": 1}', '"', "\\", "{", "}", ",", "[", "]"]
    if tools:
        block = [tools.block_begin, tools.call_begin, tools.call_end, tools.block_end, tools.separator, tools.between]
        known += [text for text in block if text] + [text for text, _ in WELL_FORMED[tools.name].values()]
        known += ["<parameter=n>", "</parameter>"] if tools.syntax is CallSyntax.PARAMETERS else []
    if reasoning:
        known += [*reasoning.begins, reasoning.end, *reasoning.content_begins]
    return known + [text[: len(text) // 2] for text in known if len(text) > 1]


@settings(deadline=None, max_examples=share(1200))  # the machine may be busy
@given(st.data())
def test_the_parts_do_not_depend_on_the_pieces(data: st.DataObject) -> None:
    tools = data.draw(st.sampled_from([None, *TOOL_FORMATS]))
    reasoning = data.draw(st.sampled_from([None, *REASONING_FORMATS]))
    inside = reasoning is not None and data.draw(st.booleans())
    pieces = data.draw(st.lists(st.sampled_from(fragments(tools, reasoning)), max_size=8))
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def parsed(pieces: Iterable[str]) -> Answer:
        return answer(a_parser(tools, reasoning, starts_in_reasoning=inside), pieces)

    assert parsed(parts) == parsed([text]) == parsed(text)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.text()))
def test_without_families_everything_is_content(pieces: list[str]) -> None:
    assert answer(a_parser(), pieces) == Answer("".join(pieces))


@settings(deadline=None)  # the machine may be busy
@given(st.sampled_from(TOOL_FORMATS), st.text())
def test_text_without_calls_is_content(tools: ToolFormat, text: str) -> None:
    assert answer(a_parser(tools), text).content == text
