"""JSON schemas: which parts of one the grammar compiler would pass over. Used by the gateway, which refuses them by name. Pure."""

from collections.abc import Iterator
from typing import Any

# What changes which values are valid, and what xgrammar 0.2.8 compiles as if it were not there (tried, one by one).
UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
})  # fmt: skip
MOST_WHITESPACE = 16  # characters between two parts of JSON: small models would write spaces for ever
_OF_ONE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_OF_MANY = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def unsupported(schema: Any) -> str | None:
    """The first part that would not be kept, with its path; None where all would. Whether the schema is one at all says the compiler."""
    waiting = [("schema", schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        for name, value in part.items():
            if name in UNSUPPORTED or (name == "uniqueItems" and value is True):
                return f"{path}.{name}"
            if name == "allOf" and isinstance(value, list) and len(value) > 1:
                return f"{path}.allOf (of more than one schema)"
            if name == "$ref" and isinstance(value, str) and not value.startswith("#"):
                return f"{path}.$ref (to another document)"
        waiting.extend(_below(path, part))
    return None


def _below(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas that a schema has, by path."""
    for name in _OF_ONE:
        if isinstance(schema.get(name), dict):
            yield f"{path}.{name}", schema[name]
    for name in _OF_MANY:
        if isinstance(schema.get(name), list):
            yield from ((f"{path}.{name}.{place}", part) for place, part in enumerate(schema[name]))
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            yield from ((f"{path}.{name}.{key}", part) for key, part in schema[name].items())
