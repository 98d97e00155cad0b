"""The turns of a chat: from raw JSON to messages as chat templates take them. Called by `prompts` and `tokenization`; pure.

Clients send answers of ours back as they got them, tool calls and thoughts included; results of tools come as messages of role `tool`.
"""

from typing import Any

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import check_role, fields_of, missing, quoted, read, shown, unknown

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CALLS = 128  # of one message
_PART_FIELDS = {"type", "text", "cache_control"}  # the last is Anthropic's: prefixes are found here without it
_ADDED = "provider_specific_fields"  # by litellm, to answers: what it did not know of them
_EMPTY = Raw(b'""')


def conversation(messages: Raw, most_messages: int) -> list[Message]:
    """Raises InvalidRequestError with the path of what is wrong."""
    turns = read(messages, list[Raw], "messages")
    if not turns:
        raise InvalidRequestError("messages=[] has no message: send at least 1", param="messages")
    if len(turns) > most_messages:
        raise InvalidRequestError(
            f"messages has {len(turns)} messages; this deployment takes at most {most_messages} tokens, and each message "
            "has at least one: send fewer",
            param="messages",
            code="context_length_exceeded",
        )
    return [_message(turn, f"messages.{index}") for index, turn in enumerate(turns)]


def text_bytes(messages: list[Message]) -> int:
    """Of what every template shows."""
    return sum(len(message["content"].encode()) for message in messages)


def _message(raw: Raw, param: str) -> Message:
    """One turn. Clients send an answer of ours back with its empty fields (refusal, tool_calls, annotations)."""
    fields = fields_of(raw, param)
    if "role" not in fields:
        raise missing(f"{param}.role")
    role = read(fields.pop("role"), str, f"{param}.role")
    check_role(role, ROLES, param)
    message: Message = {"role": "system" if role == "developer" else role}  # the newer name of what templates know
    if role == "assistant":
        message |= _of_assistant(fields, param)
    if role == "tool":
        if "tool_call_id" not in fields:
            raise missing(f"{param}.tool_call_id")
        message["tool_call_id"] = read(fields.pop("tool_call_id"), str, f"{param}.tool_call_id")
    if "content" not in fields and "tool_calls" not in message:
        raise missing(f"{param}.content")
    message["content"] = _content(fields.pop("content", _EMPTY), f"{param}.content")
    if "name" in fields:
        message["name"] = read(fields.pop("name"), str, f"{param}.name")
    for name in fields:
        raise unknown(f"{param}.{name}")
    return message


def _of_assistant(fields: dict[str, Raw], param: str) -> Message:
    """What only an answer has: calls, and thoughts, which templates show or leave out as their models want it."""
    message: Message = {}
    fields.pop(_ADDED, None)
    for name in ("reasoning_content", "reasoning"):
        if name in fields:
            message["reasoning_content"] = read(fields.pop(name), str, f"{param}.{name}")
    if "tool_calls" in fields:
        path = f"{param}.tool_calls"
        calls = read(fields.pop("tool_calls"), list[Raw], path)
        if len(calls) > MOST_CALLS:
            raise InvalidRequestError(f"{path} has {len(calls)} calls; {MOST_CALLS} at most are taken here", param=path)
        message["tool_calls"] = [_call(call, f"{path}.{index}") for index, call in enumerate(calls)]
    return message


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct, frozen=True):
    """OpenAI's form; streams have an `index` as well."""

    function: _Function
    id: str = ""
    type: str = "function"


def _call(raw: Raw, param: str) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    call = read(raw, _Call, param)
    text = call.function.arguments.strip() or "{}"
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        path = f"{param}.function.arguments"
        raise InvalidRequestError(
            f"{path}={quoted(text)} is not valid: it is the JSON text of an object; leave out a call that was cut off",
            param=path,
        ) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _content(raw: Raw, param: str) -> str:
    """Text, or parts of type `text`, which are one text."""
    if bytes(raw)[:1] != b"[":
        return read(raw, str, param)
    return "".join(_part(one, f"{param}.{index}") for index, one in enumerate(read(raw, list[Raw], param)))


def _part(raw: Raw, param: str) -> str:
    fields = read(raw, dict[str, Raw], param)
    for name in ("type", "text"):
        if name not in fields and (name == "type" or bytes(fields["type"]) == b'"text"'):
            raise missing(f"{param}.{name}")
    if bytes(fields["type"]) != b'"text"':
        raise InvalidRequestError(
            f"{param}.type={shown(fields['type'])} is not valid: content parts here have the type 'text'",
            param=f"{param}.type",
        )
    for name in fields:
        if name not in _PART_FIELDS:
            raise unknown(f"{param}.{name}")
    return read(fields["text"], str, f"{param}.text")
