"""An assistant's answer, split into reasoning, content and tool calls while it is streamed.

Used by the chat interface for one choice of an answer; pure, knows neither tokens nor HTTP. What comes out does not
depend on how the text was cut into pieces, and each piece of text is looked at once.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from strata_runtime.gateway.text.answer_parts import Parts, PartsBuilder, ToolCallDelta
from strata_runtime.gateway.text.json_scanner import JsonScanner
from strata_runtime.gateway.text.parameter_values import as_json, as_string
from strata_runtime.gateway.text.reasoning import ReasoningFormat
from strata_runtime.gateway.text.text_reader import Reading, TextReader
from strata_runtime.gateway.text.tool_formats import (
    PARAMETER_BEGIN,
    PARAMETER_END,
    PARAMETER_NAME_END,
    CallSyntax,
    ToolFormat,
)

__all__ = ["AnswerParser", "Parts", "ToolCallDelta"]

_NAME = re.compile(r"[^\s{}\[\]<>\"'`,;]*")
_PARAMETER_NAME = re.compile(r"[^>\n]*")
_ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"type", "id"})  # that a call may have


class _NoCallError(Exception):
    """What was begun is not a call after all."""


class AnswerParser:
    """Fed with the text of one choice, in order; `schemas` are those of the tools' parameters by name. Of calls beyond `most_calls` nothing comes.

    Thoughts are recognized at the beginning of the answer only; those that are never closed are reasoning to the end.

    A call is reported once its name is known and its arguments begin. What was begun before and does not get there is
    content, as written. From then on the call stands, as it would had its model run out of tokens there: arguments that
    turn out malformed are passed on as written, to the end of the call, for the client to refuse and the model to see;
    text between complete arguments and the end of the call is content; an end that is missing is not missed.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        starts_in_reasoning: bool = False,
        new_id: Callable[[], str],
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        most_calls: int | None = None,
    ) -> None:
        self._reader = TextReader()
        self._parts = PartsBuilder(new_id, most_calls)
        self._schemas = schemas or {}
        self._steps = self._answer(tool_format, reasoning, starts_in_reasoning=starts_in_reasoning)

    @property
    def call_count(self) -> int:
        return self._parts.call_count

    @property
    def called(self) -> bool:
        return self.call_count > 0

    def push(self, text: str) -> Parts:
        """Take the next piece. Text that could be the beginning of a marker or of a call waits for more."""
        self._reader.push(text)
        next(self._steps, None)
        return self._parts.take()

    def flush(self) -> Parts:
        """The answer is over: what waited is what it is."""
        self._reader.close()
        next(self._steps, None)
        return self._parts.take()

    def _answer(
        self, tools: ToolFormat | None, reasoning: ReasoningFormat | None, *, starts_in_reasoning: bool
    ) -> Reading[None]:
        if reasoning:
            yield from self._thoughts(reasoning, inside=starts_in_reasoning)
        if tools and not tools.opening:
            yield from self._block(tools)
        markers = (tools.opening,) if tools and tools.opening else ()
        while (yield from self._reader.until(markers, self._parts.add_content)):
            assert tools is not None, "without tools there are no markers"
            yield from self._block(tools)
        self._parts.end()

    def _thoughts(self, reasoning: ReasoningFormat, *, inside: bool) -> Reading[None]:
        begun, before = yield from self._begin_of_thought(reasoning)  # models may repeat what their prompt ended with
        if inside and not begun:
            self._parts.add_reasoning(before)
        while inside or begun:
            yield from self._reader.until((reasoning.end,), self._parts.add_reasoning)
            yield from self._reader.one_of((reasoning.end,))
            self._parts.end_reasoning()
            inside = False
            begun, before = yield from self._begin_of_thought(reasoning)
        if not (yield from self._reader.one_of(reasoning.content_begins)):
            self._parts.add_content(before)

    def _begin_of_thought(self, reasoning: ReasoningFormat) -> Reading[tuple[bool, str]]:
        """Whether one begins here, and the white space that was before."""
        before = yield from self._reader.spaces()
        begun = yield from self._reader.one_of(reasoning.begins)
        return bool(begun), before

    def _block(self, tools: ToolFormat) -> Reading[None]:
        """Calls, if these are calls, and content from where they are not."""
        reader = self._reader
        reader.hold()
        try:
            yield from reader.words(tools.prefix)
            yield from self._expect(tools.block_begin)
            while True:
                yield from self._expect(tools.call_begin)
                yield from self._call(tools)
                yield from self._end_of_call(tools)
                reader.hold()
                if tools.block_end and (yield from reader.words(tools.block_end, may_be_cut=True)):
                    break
                yield from self._expect(tools.separator)
        except _NoCallError:
            self._parts.add_content(reader.release())
        reader.release()

    def _call(self, tools: ToolFormat) -> Reading[None]:
        if tools.syntax is CallSyntax.OBJECT:
            yield from self._object(tools)
            return
        reader = self._reader
        yield from reader.spaces()
        name = yield from reader.run(_NAME)
        if tools.id_begin and (yield from reader.words(tools.id_begin)):
            yield from reader.run(_NAME)
        separated = yield from reader.words(tools.between)
        if tools.syntax is CallSyntax.PARAMETERS:
            if not separated:
                raise _NoCallError
            self._begin_call(name)
            yield from self._parameters(_properties(self._schemas.get(name)))
            return
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            raise _NoCallError
        self._begin_call(name)
        yield from self._arguments(tools)

    def _end_of_call(self, tools: ToolFormat) -> Reading[None]:
        reader = self._reader
        if (yield from reader.words(tools.call_end, may_be_cut=True)):
            return
        yield from reader.until(tools.ends, self._parts.add_content)
        yield from reader.words(tools.call_end, may_be_cut=True)

    def _object(self, tools: ToolFormat) -> Reading[None]:
        """`{"name": ..., "arguments": {...}}`: other keys are dropped, arguments before the name wait for it."""
        yield from self._expect("{")
        name, arguments = yield from self._name_and_arguments(tools)
        self._begin_call(name)
        if arguments:
            self._parts.add_arguments(arguments)
        elif not (yield from self._arguments(tools)):
            return
        if not (yield from self._reader.words("}", may_be_cut=True)) and (yield from self._reader.peek()) == ",":
            yield from self._reader.json(JsonScanner(opened="{"), _drop)

    def _name_and_arguments(self, tools: ToolFormat) -> Reading[tuple[str, str]]:
        """Read an object's keys until both are known. The arguments are empty where they are what comes next."""
        reader = self._reader
        name, arguments = "", ""
        while not (name and arguments):
            key = yield from self._string()
            yield from self._expect(":")
            yield from reader.spaces()
            if key == "name":
                name = yield from self._string()
            elif key in _ARGUMENTS_KEYS:
                if name and (yield from reader.peek()) == "{":
                    return name, ""
                arguments = _arguments_text((yield from self._value()))
            elif key in _OTHER_KEYS or tools.opening:
                yield from self._value()
            else:  # so far this is any JSON that answers a question
                raise _NoCallError
            if not ((name and arguments) or (yield from reader.words(","))):
                if name and tools.opening and (yield from reader.peek()) == "}":
                    return name, "{}"
                raise _NoCallError
        return name, arguments

    def _arguments(self, tools: ToolFormat) -> Reading[bool]:
        """Report them as they come; False where they are malformed, or the text ended."""
        complete = yield from self._reader.json(JsonScanner(), self._parts.add_arguments)
        if not complete:
            yield from self._reader.until(tools.ends, self._parts.add_arguments)
        return complete

    def _parameters(self, properties: Mapping[str, Any]) -> Reading[None]:
        """Report the arguments parameter by parameter: what JSON its text means is known at its end."""
        reader, emit = self._reader, self._parts.add_arguments
        before, rest = "{", ""
        while True:
            reader.hold()
            if not (yield from reader.words(PARAMETER_BEGIN)):
                break
            name = (yield from reader.run(_PARAMETER_NAME)).strip()
            if not (yield from reader.one_of((PARAMETER_NAME_END,))):
                rest = reader.release()
                break
            reader.release()
            emit(f"{before}{as_string(name)}: ")
            before = ", "
            value: list[str] = []
            yield from reader.until((PARAMETER_END,), value.append)
            if not (yield from reader.one_of((PARAMETER_END,))):
                emit(as_string("".join(value).removeprefix("\n"))[:-1])  # cut where the text is
                return
            emit(as_json("".join(value), properties.get(name)))
        reader.release()
        if (yield from reader.peek()):
            emit("{}" if before == "{" else "}")
        self._parts.add_content(rest)

    def _begin_call(self, name: str) -> None:
        if not (name and name.isprintable()):
            raise _NoCallError
        self._reader.release()
        self._parts.begin_call(name)

    def _expect(self, text: str) -> Reading[None]:
        if not (yield from self._reader.words(text)):
            raise _NoCallError

    def _string(self) -> Reading[str]:
        yield from self._reader.spaces()
        if (yield from self._reader.peek()) != '"':
            raise _NoCallError
        return _loads_string((yield from self._value()))

    def _value(self) -> Reading[str]:
        pieces: list[str] = []
        if not (yield from self._reader.json(JsonScanner(), pieces.append)):
            raise _NoCallError
        return "".join(pieces)


def _arguments_text(value: str) -> str:
    """Of arguments that are no plain object: some models write the object into a string, or null for an empty one."""
    text = _loads_string(value) if value.startswith('"') else value
    if text == "null":
        return "{}"
    if not (text.startswith("{") and text.endswith("}")):
        raise _NoCallError
    return text


def _loads_string(value: str) -> str:
    try:
        text = str(json.loads(value, strict=False))
        text.encode()
    except ValueError as error:  # half of a surrogate pair cannot be encoded
        raise _NoCallError from error
    return text


def _properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    properties = (schema or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _drop(_: str) -> None:
    pass
