"""The JSON that a parameter's plain text means."""

from typing import Any

import pytest

from strata_runtime.gateway.text.parameter_values import as_json

TABLE: dict[str, tuple[str, Any, str]] = {
    "string": ("Berlin", {"type": "string"}, '"Berlin"'),
    "string of digits": ("10115", {"type": "string"}, '"10115"'),
    "string with quotes": ('"a"', {"type": "string"}, '"\\"a\\""'),
    "string on lines of its own": ("\n a\n\n", {"type": "string"}, '" a\\n"'),
    "string of an enumeration": ("1", {"enum": ["1", "2"]}, '"1"'),
    "integer": ("\n1\n", {"type": "integer"}, "1"),
    "integer as number": ("1", {"type": "number"}, "1"),
    "no integer": ("1.5", {"type": "integer"}, '"1.5"'),
    "boolean": ("true", {"type": "boolean"}, "true"),
    "Python's boolean": ("False", {"type": "boolean"}, "false"),
    "boolean is no integer": ("true", {"type": "integer"}, '"true"'),
    "null or string": ("null", {"type": ["string", "null"]}, "null"),
    "string or null": ("nil", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"nil"'),
    "object": ('{ "a": [1] }', {"type": "object"}, '{ "a": [1] }'),
    "Python's object": ("{'a': 1}", {"type": "object"}, "\"{'a': 1}\""),
    "constant": ("2", {"const": 2}, "2"),
    "no type": ("[1]", {"description": "anything"}, "[1]"),
    "reference": ('{"a": 1}', {"$ref": "#/$defs/a"}, '{"a": 1}'),
    "no schema": ("1", None, "1"),
    "no schema, text": ("one", None, '"one"'),
    "not a number": ("NaN", None, '"NaN"'),
    "nested too deep": ("[" * 100_000, None, '"' + "[" * 100_000 + '"'),
    "empty": ("\n\n", None, '""'),
    "odd schema": ("a", {"type": 1, "enum": "a", "anyOf": 2}, '"a"'),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_text_becomes_the_json_that_the_schema_wants(case: str) -> None:
    text, schema, expected = TABLE[case]
    assert as_json(text, schema) == expected
