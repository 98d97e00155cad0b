"""JSON schemas: which parts of one the grammar compiler would pass over. Used by the gateway, which refuses them by name. Pure.

What is said here of the compiler is of xgrammar 0.2.8, tried one by one. What it says of itself while it compiles, `trial` listens to.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

# What changes which values are valid, and what is compiled as if it were not there.
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

_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
# Of a schema that has one of these, the first is all that is kept.
_DECIDING = (
    "$ref",
    "const",
    "enum",
    *_ALTERNATIVES,
)
# A schema without a type has that which these belong to; without any of them it may be any value.
_OBJECTS = frozenset({"properties", "additionalProperties", "unevaluatedProperties"})
_ARRAYS = frozenset({"items", "prefixItems", "unevaluatedItems"})
_CONSTRAINTS = _OBJECTS | _ARRAYS | {
    "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "minItems",
    "maxItems", "additionalItems", "required", "minProperties", "maxProperties", "patternProperties", "propertyNames", *_DECIDING,
}  # fmt: skip
_FORMATS = frozenset({  # those that are kept, instead of a pattern
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference", "uri-template",
    "json-pointer", "relative-json-pointer",
})  # fmt: skip


def unsupported(schema: Any) -> str | None:
    """The first part that would not be kept, with its path; None where all would. Whether the schema is one at all says the compiler."""
    waiting, seen = [("schema", schema)], set[int]()
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if (name := _passed_over(path, part)) is not None:
            return f"{path}.{name}"
        waiting.extend(_below(path, part))
        if (target := _referred(part.get("$ref"), schema)) is not None:
            waiting.append(target)
    return None


def _passed_over(path: str, schema: Schema) -> str | None:
    """A keyword of this schema, and why where that is not clear."""
    for name, value in schema.items():
        if name in UNSUPPORTED or (name == "uniqueItems" and value is True):
            return name
        if name == "$ref" and isinstance(value, str) and value != "#" and not value.startswith("#/"):
            return "$ref (to another document, or to an anchor)"
        if name in {"anyOf", "oneOf", "type"} and value == []:
            return f"{name} (of nothing)"
        if name == "allOf" and isinstance(value, list) and len(value) > 1:
            return "allOf (of more than one schema)"
    return _beside(path, schema)


def _beside(path: str, schema: Schema) -> str | None:
    """One that is passed over for what is, or is not, beside it."""
    constraints = [name for name, value in schema.items() if name in _CONSTRAINTS and not isinstance(value, bool)]
    deciding = next((name for name in _DECIDING if name in schema), None)
    if deciding is not None:
        needless = {deciding, "type"} if _have_type(schema, deciding) else {deciding}
        lost = next((name for name in constraints if name not in needless), None)
        return None if lost is None else f"{lost} (beside {deciding})"
    if constraints and _types(schema) == [None] and not path.endswith(".propertyNames"):  # these are texts
        return f"{constraints[0]} (without a type)"
    if "pattern" in schema and isinstance(schema.get("format"), str) and schema["format"] in _FORMATS:
        return "pattern (beside format)"
    return _required(schema)


def _required(schema: Schema) -> str | None:
    names, properties = schema.get("required"), schema.get("properties") or {}
    if isinstance(names, list) and isinstance(properties, dict):
        unknown = next((name for name in names if isinstance(name, str) and name not in properties), None)
        return None if unknown is None else f"required ({unknown!r} is none of its properties)"
    return None


def _have_type(schema: Schema, deciding: str) -> bool:
    """Whether a type beside them says nothing that the deciding values or schemas do not say."""
    parts = schema[deciding] if isinstance(schema[deciding], list) else []
    if deciding in _ALTERNATIVES:
        said = [each for part in parts for each in _types(part)]
    else:
        said = (
            [None]
            if deciding == "$ref"
            else [_type_of(each) for each in (parts if deciding == "enum" else [schema["const"]])]
        )
    own = _types({"type": schema.get("type")})
    return all(each in own or (each == "integer" and "number" in own) for each in said)


def _types(schema: Any) -> list[Any]:
    """Those that a schema is of; one None where it does not say."""
    if not isinstance(schema, dict):
        return [None]
    told = schema.get("type", "object" if _OBJECTS & schema.keys() else "array" if _ARRAYS & schema.keys() else None)
    return told if isinstance(told, list) else [told]


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _referred(ref: Any, root: Any) -> tuple[str, Any] | None:
    """What a reference within the document refers to, which may be where no schema is looked for."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found = root
    for name in ref.removeprefix("#/").split("/"):
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return f"schema.{ref.removeprefix('#/').replace('/', '.')}", found


def _below(path: str, schema: Schema) -> Iterator[tuple[str, Any]]:
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
