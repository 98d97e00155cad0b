"""From a body of the Responses interface to the chat that it means. Called by `app`, off its event loop; pure."""

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import check_role, fields_of, missing, quoted, read, shown, unknown
from strata_runtime.gateway.http.parameters import ChatBody
from strata_runtime.gateway.http.prompts import PLAIN, Bounds, Prepared, prepare_chat
from strata_runtime.gateway.http.responses.parameters import FunctionTool, ResponsesBody, TextFormat
from strata_runtime.gateway.http.turns import (
    Turns,
    encoded,
    function_tool,
    named_choice,
    naming,
    schema_format,
    with_form_named,
)
from strata_runtime.gateway.text.tokenizer import Tokenizer

GLUE = "\n\n"  # between instructions and what else stands before the conversation: templates take one such message
_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
}
_ITEMS = {  # fields of each kind
    "message": {"type", "id", "status", "role", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments", "parsed_arguments"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content"},
}
_PART_FIELDS = {
    "type",
    "text",
    "annotations",
    "logprobs",
    "parsed",
}  # an answer of ours may come back with its logprobs
_ROLES = ("system", "developer", "user", "assistant")
_CHOICES = (b'"none"', b'"auto"', b'"required"')


def prepare_response(body: ResponsesBody, tokenizer: Tokenizer, bounds: Bounds) -> tuple[Prepared, dict[str, Raw]]:
    """The request, and what its answer says again of it."""
    tools = [_tool(raw, f"tools.{index}") for index, raw in enumerate(body.tools)]
    choice = _tool_choice(body.tool_choice)
    wanted = ChatBody(
        model=body.model,
        messages=_messages(body, bounds.tokens),
        tools=encoded([function_tool(each.name, each.description, each.parameters, each.strict) for each in tools])
        if tools
        else None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort,
        response_format=_response_format(body.text.format),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs,
    )
    with naming(_NAMES):
        # As if it were not streamed: the last events of a stream have all log probabilities again.
        prepared = prepare_chat(wanted, tokenizer, bounds)
    if body.wants_logprobs and prepared.parsing != replace(PLAIN, most_calls=prepared.parsing.most_calls):
        raise InvalidRequestError(
            f"top_logprobs={body.top_logprobs} is not supported for answers that may have thoughts or calls: leave it and "
            "message.output_text.logprobs out, or send /v1/chat/completions",
            param="top_logprobs",
            code="unsupported_parameter",
        )
    prepared = replace(prepared, body=msgspec.structs.replace(prepared.body, stream=body.stream))
    return with_form_named(prepared, _NAMES), _said_again(body, tools if prepared.parsing.tool_format else [])


def _said_again(body: ResponsesBody, tools: list[FunctionTool]) -> dict[str, Raw]:
    """Of what is in the prompt too, or bounded: it stays as long as the answer takes. Tools: those that may be called."""
    chosen = Raw(b'"auto"') if body.tool_choice is None else body.tool_choice
    encoded = msgspec.json.encode(
        {
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "background": False,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _format_again(body.text.format)},
            "tool_choice": chosen,
            "tools": tools,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation,
        }
    )
    return msgspec.json.decode(encoded, type=dict[str, Raw])  # text, not objects: some are large


def _format_again(told: TextFormat) -> dict[str, Any]:
    fields = {"name": told.name, "schema": told.schema, "description": told.description, "strict": told.strict}
    return {"type": told.type, **(fields if told.type == "json_schema" else {})}


def _messages(body: ResponsesBody, most_items: int) -> Raw:
    turns = Turns()
    if body.instructions:
        turns.add("system", body.instructions)
    if bytes(body.input)[:1] == b'"':
        turns.add("user", read(body.input, str, "input"))
        return turns.encoded()
    if bytes(body.input)[:1] != b"[":
        raise InvalidRequestError(
            f"input={shown(body.input)} is not valid: send text, or a list of items", param="input"
        )
    items = read(body.input, list[Raw], "input")
    if not items:
        raise InvalidRequestError("input=[] has no item: send at least 1", param="input")
    if len(items) > most_items:
        raise InvalidRequestError(
            f"input has {len(items)} items; this deployment takes at most {most_items} tokens: send fewer",
            param="input",
            code="context_length_exceeded",
        )
    for index, item in enumerate(items):
        _add(turns, item, f"input.{index}")
    return turns.encoded()


def _add(turns: Turns, raw: Raw, param: str) -> None:
    given = fields_of(raw, param)
    kind = read(given["type"], str, f"{param}.type") if "type" in given else "message"
    if kind not in _ITEMS:
        raise InvalidRequestError(
            f"{param}.type={quoted(kind)} is not supported by this server: items here are {', '.join(_ITEMS)}",
            param=f"{param}.type",
            code="unsupported_item",
        )
    for name in given:
        if name not in _ITEMS[kind]:
            raise unknown(f"{param}.{name}")
    match kind:
        case "message":
            _add_message(turns, given, param)
        case "function_call":
            call_id, name, arguments = (_string(given, name, param) for name in ("call_id", "name", "arguments"))
            read(Raw(arguments.encode() or b"{}"), dict[str, Raw], f"{param}.arguments")
            turns.call(call_id, name, arguments)
        case "function_call_output":
            turns.result(
                _string(given, "call_id", param), _text(given.get("output"), f"{param}.output", ("input_text",))
            )
        case _:
            told = "content" if "content" in given else "summary"
            kinds = ("reasoning_text",) if told == "content" else ("summary_text",)
            turns.think(_text(given.get(told), f"{param}.{told}", kinds))


def _add_message(turns: Turns, given: dict[str, Raw], param: str) -> None:
    role = _string(given, "role", param)
    check_role(role, _ROLES, param)
    kinds = ("output_text", "input_text") if role == "assistant" else ("input_text",)
    text = _text(given.get("content"), f"{param}.content", kinds)
    if role == "assistant":
        turns.say(text)
    elif role == "user":
        turns.add(role, text)
    else:
        turns.add("system", text, glue=GLUE)


def _string(given: dict[str, Raw], name: str, param: str) -> str:
    if name not in given:
        raise missing(f"{param}.{name}")
    return read(given[name], str, f"{param}.{name}")


def _text(raw: Raw | None, param: str, kinds: tuple[str, ...]) -> str:
    """Text, or parts of these kinds, which are one text."""
    if raw is None:
        return ""
    if bytes(raw)[:1] != b"[":
        return read(raw, str, param)
    return "".join(_part(one, f"{param}.{index}", kinds) for index, one in enumerate(read(raw, list[Raw], param)))


def _part(raw: Raw, param: str, kinds: tuple[str, ...]) -> str:
    given = fields_of(raw, param)
    kind = _string(given, "type", param)
    if kind not in kinds:
        raise InvalidRequestError(
            f"{param}.type={quoted(kind)} is not supported by this server: parts here have the type {kinds[0]!r}",
            param=f"{param}.type",
            code="unsupported_part",
        )
    for name in given:
        if name not in _PART_FIELDS or name == "annotations":
            raise unknown(f"{param}.{name}")
    return _string(given, "text", param)


def _tool(raw: Raw, param: str) -> FunctionTool:
    kind = read(raw, dict[str, Raw], param).get("type", Raw(b'"function"'))
    if bytes(kind) != b'"function"':
        raise InvalidRequestError(
            f"{param}.type={shown(kind)} is not supported by this server, which has no tools of its own: send tools of the type "
            "'function', and call them yourself",
            param=f"{param}.type",
            code="unsupported_tool",
        )
    tool = read(raw, FunctionTool, param)
    read(tool.parameters, dict[str, Raw] | None, f"{param}.parameters")  # type: ignore[arg-type]
    return tool


def _tool_choice(raw: Raw | None) -> Raw | None:
    """As a chat has it."""
    if raw is None or bytes(raw) in _CHOICES:
        return raw
    if bytes(raw)[:1] == b"{":
        named = read(raw, dict[str, Raw], "tool_choice")
        if bytes(named.get("type", raw)) == b'"function"' and set(named) == {"type", "name"}:
            return encoded(named_choice(read(named["name"], str, "tool_choice.name")))
    raise InvalidRequestError(
        f"tool_choice={shown(raw)} is not valid: send 'none', 'auto', 'required', or "
        '{"type": "function", "name": ...}',
        param="tool_choice",
    )


def _response_format(told: TextFormat) -> Raw | None:
    match told.type:
        case "text":
            return None
        case "json_object":
            return encoded({"type": "json_object"})
        case "json_schema":
            return schema_format(told.name, told.schema)
