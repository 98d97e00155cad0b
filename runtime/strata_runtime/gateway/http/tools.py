"""Tools that a chat offers, and which of them it wants called. Called by `prompts`; pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.bodies import read, shown
from strata_runtime.gateway.http.parameters import TOOL_NAME
from strata_runtime.structured.schemas import unsupported

MOST_TOOLS = 512
_NAME = re.compile(TOOL_NAME)

Choice = Literal["none", "auto", "required"]


class _Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True):
    type: str
    function: _Function


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat offers. `given`: as templates take them; `schemas`: of each tool's arguments."""

    given: tuple[dict[str, Any], ...]
    schemas: dict[str, dict[str, Any]]
    choice: Choice
    is_named: bool = False  # one of them, by its name

    def __bool__(self) -> bool:
        return bool(self.given)


NO_TOOLS = Tools((), {}, "none")


def tools_of(tools: Raw | None, tool_choice: Raw | None) -> Tools:
    """Those that may be called: with `tool_choice` a name, that one alone is. Raises InvalidRequestError."""
    given = [] if tools is None else read(tools, list[Raw], "tools")
    if len(given) > MOST_TOOLS:
        raise InvalidRequestError(f"tools has {len(given)} tools; {MOST_TOOLS} at most are taken here", param="tools")
    parsed = [_tool(raw, f"tools.{index}") for index, raw in enumerate(given)]
    choice, name = _choice(tool_choice)
    if choice != "none" and tool_choice is not None and not parsed:
        raise InvalidRequestError(
            f"tool_choice={shown(tool_choice)} needs tools: send some, or leave it out", param="tool_choice"
        )
    if choice == "none" or not parsed:
        return NO_TOOLS
    schemas = {function["name"]: function.get("parameters") or {} for function in (each["function"] for each in parsed)}
    if len(schemas) < len(parsed):
        raise InvalidRequestError("tools has two functions of one name: give each its own", param="tools")
    if name is not None:
        schemas = {name: _named(schemas, name)}
    if choice == "required":
        _check_schemas(schemas)
    return Tools(tuple(parsed), schemas, choice, name is not None)


def _named(schemas: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in schemas:
        raise InvalidRequestError(
            f"tool_choice names {name[:80]!r}; the tools are {', '.join(map(repr, schemas))[:400]}", param="tool_choice"
        )
    return schemas[name]


def _check_schemas(schemas: dict[str, dict[str, Any]]) -> None:
    """Arguments of calls that must come are held to their schemas."""
    for name, schema in schemas.items():
        if schema.get("type", "object") != "object":
            raise InvalidRequestError(
                f"the parameters of {name!r} have the type {str(schema['type'])[:80]!r}: the arguments of a call are an object",
                param="tools",
            )
        if (part := unsupported(schema)) is not None:
            raise InvalidRequestError(
                f"the parameters of {name!r} have {part.removeprefix('schema.')[:80]}, which calls that must come cannot be held to: "
                "leave it out, or send tool_choice='auto'",
                param="tools",
                code="unsupported_schema",
            )


def _tool(raw: Raw, param: str) -> dict[str, Any]:
    tool = read(raw, _Tool, param)
    if tool.type != "function":
        raise InvalidRequestError(
            f"{param}.type={tool.type[:80]!r} is not valid: tools here have the type 'function'", param=f"{param}.type"
        )
    if not _NAME.fullmatch(tool.function.name):
        raise InvalidRequestError(
            f"{param}.function.name={tool.function.name[:80]!r} is not valid: a name has 1 to 128 letters, digits, or any of _ . : -",
            param=f"{param}.function.name",
        )
    plain: dict[str, Any] = msgspec.to_builtins(tool.function)
    given = {name: value for name, value in plain.items() if value is not None and name != "strict"}
    return {"type": "function", "function": given}


def _choice(raw: Raw | None) -> tuple[Choice, str | None]:
    """What is wanted, and of whom: `{"type": "function", "function": {"name": ...}}` is one function that must be called."""
    if raw is None:
        return "auto", None
    text = bytes(raw)
    for known in _CHOICES:
        if text == b'"%s"' % known.encode():
            return known, None
    if text[:1] == b"{":
        named = read(raw, dict[str, Any], "tool_choice")
        function = named.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if named.get("type") == "function" and isinstance(name, str):
            return "required", name
    raise InvalidRequestError(
        f"tool_choice={shown(raw)} is not valid: send {', '.join(map(repr, _CHOICES))}, or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


_CHOICES: Sequence[Choice] = ("none", "auto", "required")
