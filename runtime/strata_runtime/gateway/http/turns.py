"""Makes the messages of a chat out of what other interfaces call blocks or items, and their names out of a chat's. Pure.

Used by the translations of those interfaces, whose assistant's turn is several parts: in a chat it is one message.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import InvalidRequestError
from strata_runtime.gateway.http.prompts import Prepared


def encoded(value: Any) -> Raw:
    """As the body of a chat has it."""
    return Raw(msgspec.json.encode(value))


def function_tool(name: str, description: str | None, parameters: Raw, strict: bool | None) -> dict[str, Any]:  # noqa: FBT001
    """A tool as a chat has it."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def named_choice(name: str) -> dict[str, Any]:
    """The tool that must be called, as a chat has it."""
    return {"type": "function", "function": {"name": name}}


def schema_format(name: str | None, schema: Raw) -> Raw:
    """The form of an answer, as a chat has it."""
    return encoded({"type": "json_schema", "json_schema": {"name": name, "schema": schema}})


class Turns:
    """Parts come in their order; `conversation` reads what `encoded` tells."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of the calls so far

    def encoded(self) -> Raw:
        """As the body of a chat has them."""
        return encoded(self._messages)

    @property
    def last_role(self) -> str | None:
        return self._messages[-1]["role"] if self._messages else None

    @property
    def ends_with_calls(self) -> bool:
        return bool(self._messages) and "tool_calls" in self._messages[-1]

    @property
    def ends_with_text(self) -> bool:
        """Of the assistant, whose answer goes on from there."""
        return self.last_role == "assistant" and bool(self._messages[-1]["content"]) and not self.ends_with_calls

    def add(self, role: str, text: str, *, glue: str | None = None) -> None:
        """A message, or with `glue` what comes behind it in the last one, if that has the same role."""
        if glue is not None and self.last_role == role:
            self._messages[-1]["content"] += glue + text
        else:
            self._messages.append({"role": role, "content": text})

    def say(self, text: str) -> None:
        """Text of the assistant."""
        if text:
            self._assistant()["content"] += text

    def think(self, text: str) -> None:
        """A thought of the assistant, which comes before what it says and calls."""
        message = self._assistant()
        if message["content"] or "tool_calls" in message:
            message = {"role": "assistant", "content": ""}
            self._messages.append(message)
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """`arguments`: JSON text."""
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    def result(self, call_id: str, text: str) -> None:
        """What a call came to; some templates show the name of what was called."""
        named = {"name": self._names[call_id]} if call_id in self._names else {}
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text, **named})

    def _assistant(self) -> dict[str, Any]:
        if self.last_role != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside name a chat's parameters; outside they have the client's own: `names[of the chat] = of the client`."""
    try:
        yield
    except InvalidRequestError as error:
        message = str(error)
        for old, new in names.items():
            message = re.sub(rf"(?<![\w.]){re.escape(old)}(?=[=.]| has\b)", new, message)
        param = None if error.param is None else renamed(error.param, names)
        raise InvalidRequestError(message, param=param, code=error.code) from error


def renamed(param: str, names: Mapping[str, str]) -> str:
    """A parameter, or a path that begins with one."""
    for old, new in names.items():
        if param == old or param.startswith(f"{old}."):
            return new + param[len(old) :]
    return param


def with_form_named(prepared: Prepared, names: Mapping[str, str]) -> Prepared:
    """What refuses a form later names the client's parameter too."""
    form = prepared.form
    return prepared if form is None else replace(prepared, form=replace(form, param=renamed(form.param, names)))
