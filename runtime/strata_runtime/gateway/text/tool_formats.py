"""How model families write tool calls, as data; and the grammar of an answer that must consist of calls.

Used by `answer_parser` to read calls, and by the chat interface to choose the family and to force calls (tool_choice).
Texts are written as the families' chat templates write them. Readers take white space in them as optional.
"""

# ruff: noqa: RUF001 (DeepSeek's markers have fullwidth bars)

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from strata_runtime.structured.schemas import MOST_WHITESPACE

PARAMETER_BEGIN, PARAMETER_NAME_END, PARAMETER_END = "<parameter=", ">", "</parameter>"


class CallSyntax(Enum):
    """What stands between the begin and the end of a call."""

    OBJECT = "object"  # {"name": "f", "arguments": {"p": 1}}
    NAMED = "named"  # f, what stands `between`, {"p": 1}
    PARAMETERS = "parameters"  # f, what stands `between`, <parameter=p>1</parameter>


def _first_word(text: str) -> str:
    return text.split(maxsplit=1)[0] if text else ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A block of calls is `block_begin`, calls with `separator` between them, `block_end`; any of these may be empty.

    Without any begin, calls are recognized at the very beginning of the answer only.
    """

    name: str
    syntax: CallSyntax
    call_begin: str = ""
    call_end: str = ""
    block_begin: str = ""
    block_end: str = ""
    separator: str = ""
    between: str = ""
    arguments_key: str = "arguments"  # of an OBJECT; readers also take the other families'
    prefix: str = ""  # may stand before a block, says nothing
    id_begin: str = ""  # between name and arguments: an id that the model made up
    special_tokens: bool = False  # whether these texts are special tokens, so that decoding must keep those
    marks: tuple[str, ...] = ()  # what a chat template of this family has
    no_marks: tuple[str, ...] = ()  # and what tells other families apart that have the marks as well

    @property
    def opening(self) -> str:
        """The marker in the text behind which a call must follow; empty where it has none."""
        return _first_word(self.block_begin or self.call_begin)

    @property
    def ends(self) -> tuple[str, ...]:
        """Where a call that has gone wrong is over: at its end, or where the next one begins."""
        texts = (self.call_end, self.call_begin or self.block_begin)
        return tuple(word for word in map(_first_word, texts) if word)


# Most specific first: `detect` takes the first that fits.
TOOL_FORMATS = (
    ToolFormat(  # Qwen3-Coder, Qwen3.5
        name="qwen3_coder",
        syntax=CallSyntax.PARAMETERS,
        call_begin="<tool_call>\n<function=",
        between=">\n",
        call_end="</function>\n</tool_call>",  # the newline before belongs to the last parameter
        separator="\n",
        marks=("<tool_call>", "<function=", "<parameter="),
    ),
    ToolFormat(  # DeepSeek-V3, R1
        name="deepseek_v3",
        syntax=CallSyntax.NAMED,
        block_begin="<｜tool▁calls▁begin｜>",
        call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        between="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        block_end="<｜tool▁calls▁end｜>",
        special_tokens=True,
        marks=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ToolFormat(  # DeepSeek-V3.1, V3.2-Exp
        name="deepseek_v31",
        syntax=CallSyntax.NAMED,
        block_begin="<｜tool▁calls▁begin｜>",
        call_begin="<｜tool▁call▁begin｜>",
        between="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        block_end="<｜tool▁calls▁end｜>",
        special_tokens=True,
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    ),
    ToolFormat(  # Mistral's tokenizers from v11 on: Mistral Small 3.2, Magistral, Devstral, Ministral 3
        name="mistral_v11",
        syntax=CallSyntax.NAMED,
        call_begin="[TOOL_CALLS]",
        between="[ARGS]",
        id_begin="[CALL_ID]",  # v11 only
        special_tokens=True,
        marks=("[TOOL_CALLS]", "[ARGS]"),
    ),
    ToolFormat(  # Mistral's tokenizers before v11: Mistral 7B v0.3, Nemo, Mixtral, Mistral Small 3.1
        name="mistral",
        syntax=CallSyntax.OBJECT,
        block_begin="[TOOL_CALLS] [",
        separator=", ",
        block_end="]",
        special_tokens=True,
        marks=("[TOOL_CALLS]",),
    ),
    ToolFormat(  # Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ
        name="hermes",
        syntax=CallSyntax.OBJECT,
        call_begin="<tool_call>\n",
        call_end="\n</tool_call>",
        separator="\n",
        special_tokens=True,  # in some of these models
        marks=("<tool_call>", "</tool_call>", "arguments"),
        no_marks=("<arg_key>", "<arg_value>"),  # GLM-4.5
    ),
    ToolFormat(  # Llama 3.1, 3.2, 3.3
        name="llama3",
        syntax=CallSyntax.OBJECT,
        arguments_key="parameters",
        prefix="<|python_tag|>",  # a special token, which need not be kept
        separator="; ",
        marks=('"parameters": dictionary of argument name',),
    ),
)
_BY_NAME = {known.name: known for known in TOOL_FORMATS}
TOOL_FORMAT_NAMES = tuple(_BY_NAME)


def tool_format(name: str) -> ToolFormat:
    """The format of this name, one of `TOOL_FORMAT_NAMES`. Raises KeyError."""
    return _BY_NAME[name]


def detect(chat_template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it is none of these."""
    for known in TOOL_FORMATS:
        if all(mark in chat_template for mark in known.marks):
            return None if any(mark in chat_template for mark in known.no_marks) else known
    return None


def structural_tag(
    written: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, calls: Literal["one", "some"]
) -> dict[str, Any]:
    """xgrammar's structural tag (https://xgrammar.mlc.ai/docs) of answers that are `calls` to these tools.

    `tools`: the JSON schema of its parameters by each tool's name. "some" is one or more.
    """
    assert tools, "a call needs a tool"
    call = {"type": "or", "elements": [_call(written, name, schema) for name, schema in tools.items()]}
    further = {"type": "star", "content": _sequence(written.separator, call)}
    some = (call, further) if calls == "some" else (call,)
    return {"type": "structural_tag", "format": _sequence(written.block_begin, *some, written.block_end)}


def _call(written: ToolFormat, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    is_json = written.syntax is not CallSyntax.PARAMETERS
    style: dict[str, Any] = {"max_whitespace_cnt": MOST_WHITESPACE} if is_json else {"style": "qwen_xml"}
    arguments = {"type": "json_schema", "json_schema": {"type": "object", **schema}, **style}
    before, after = name + written.between, ""
    if written.syntax is CallSyntax.OBJECT:
        quoted = json.dumps(name, ensure_ascii=False)
        before, after = f'{{"name": {quoted}, "{written.arguments_key}": ', "}"
    return _sequence(written.call_begin + before, arguments, after + written.call_end)


def _sequence(*elements: str | dict[str, Any]) -> dict[str, Any]:
    """Texts and formats in order, without the empty texts."""
    formats = [{"type": "const_string", "value": one} if isinstance(one, str) else one for one in elements if one]
    return {"type": "sequence", "elements": formats}
