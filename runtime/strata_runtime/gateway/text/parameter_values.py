"""The JSON value that is meant by the plain text of a parameter, where a family writes them without JSON's quotes.

Used by `answer_parser` for `CallSyntax.PARAMETERS`.
"""

import json
from collections.abc import Mapping
from typing import Any

# Chat templates show the model literals as Python prints them.
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


def as_json(text: str, schema: Any) -> str:
    """JSON text of a value that is written on lines of its own or in line.

    What reads as JSON of a type that the schema allows is that value, everything else is a string. Where the schema
    names no type, whatever reads as JSON is JSON.
    """
    plain = text.removeprefix("\n").removesuffix("\n")
    allowed = _types_of(schema)
    if allowed == {"string"}:
        return as_string(plain)
    literal = _PYTHON_LITERALS.get(plain.strip(), plain.strip())
    try:
        value = json.loads(literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return as_string(plain)
    if allowed and (isinstance(value, str) or not allowed & _TYPES[type(value)]):
        return as_string(plain)
    return literal


def as_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types_of(schema: Any) -> frozenset[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset().union(*(_TYPES.get(type(value), frozenset()) for value in values))
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        types = [_types_of(option) for option in options]
        return frozenset().union(*types) if all(types) else frozenset()
    return frozenset()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
