"""What people write for the planner, read strictly: YAML without double keys, and every problem of a text at once.

`problems_in` compares decoded YAML with a value's type: a sentence per problem, with path, value, rule and fix. Called by
`Cluster.from_yaml`; the operator's deployments have the same loader and the same kind of sentences. Knows no meaning of fields.
"""

import difflib
import json
import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml
from msgspec import inspect

from strata_planner.units import BYTES_PATTERN, parse_bytes

_BYTES_FIELD = re.compile(r".*[bB]ytes$")
_LEAVES: dict[type[inspect.Type], tuple[tuple[type, ...], str]] = {
    inspect.IntType: ((int,), "a whole number"),
    inspect.FloatType: ((int, float), "a number"),
    inspect.StrType: ((str,), "text"),
    inspect.BoolType: ((bool,), "true or false"),
}


class StrictLoader(yaml.SafeLoader):
    """Safe loading that keeps timestamps as text and refuses a key given twice (YAML would drop one silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  # PyYAML's signature
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # refused by PyYAML itself
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the field {key!r} is given twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


# What else PyYAML lets out: of numbers and tags that say nothing (`0x_`, `!!int ""`, `!!bool x`), and of aliases of themselves.
_STUMBLES = (ValueError, OverflowError, RecursionError, LookupError, AttributeError, TypeError)


@contextmanager
def only_yaml_errors() -> Iterator[None]:
    """Around whatever reads a text: each error of it is a yaml.YAMLError."""
    try:
        yield
    except _STUMBLES as error:
        raise yaml.YAMLError(
            f"holds what cannot be read ({type(error).__name__}: {error}); write values out"
        ) from error


def load_yaml(text: str) -> Any:
    """The one document of a text, quantities of bytes (`40Gi`) as numbers. Raises yaml.YAMLError."""
    with only_yaml_errors():
        return _with_bytes(yaml.load(text, Loader=StrictLoader))  # noqa: S506  a SafeLoader


def problems_in(data: Any, kind: type, path: str = "", *, partial: bool = False) -> Iterator[str]:
    """Everything that keeps `data` from being a `kind`. `partial`: fields may be missing."""
    yield from _problems(data, inspect.type_info(kind), path, partial=partial)


def shown(value: Any) -> str:
    """A value as its writer wrote it, shortened."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace").decode()
    except (ValueError, RecursionError):  # a number of thousands of digits, a list that holds itself
        return f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= 80 else f"{text[:77]}..."


def suggestion(wanted: str, names: list[str], prefix: str = "", what: str = "fields") -> str:
    """The name that was probably meant, else all there are."""
    folded = {name.lower(): name for name in names}
    asked = wanted.lower().replace("_", "")
    longer = [name for name in folded if asked and name.startswith(asked)]
    near = longer or difflib.get_close_matches(asked, folded, n=1, cutoff=0.6)
    return f"did you mean {prefix}{folded[near[0]]}?" if near else f"the {what} here are {', '.join(names) or 'none'}"


def _with_bytes(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _bytes(value) if _is_bytes(key, value) else _with_bytes(value) for key, value in data.items()}
    return [_with_bytes(each) for each in data] if isinstance(data, list) else data


def _is_bytes(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and _BYTES_FIELD.fullmatch(key) is not None


def _bytes(text: str) -> int | str:
    return parse_bytes(text) if BYTES_PATTERN.fullmatch(text) else text


def _problems(data: Any, info: inspect.Type, path: str, *, partial: bool = False) -> Iterator[str]:
    match info:
        case inspect.StructType():
            yield from _struct_problems(data, info, path, partial=partial)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            if not isinstance(data, list):
                yield f"{path or 'the text'}: {shown(data)}: a list is expected; write its items with '- ' below it or in [ ]"
            for number, each in enumerate(data if isinstance(data, list) else ()):
                yield from _problems(each, item, f"{path}[{number}]")
        case inspect.DictType(value_type=value):
            if not isinstance(data, Mapping):
                yield f"{path or 'the text'}: {shown(data)}: names with values are expected; write them below it"
            for key, each in data.items() if isinstance(data, Mapping) else ():
                yield from _problems(each, value, f"{path}.{key}")
        case inspect.UnionType(types=types):
            if data is not None:
                yield from _problems(data, next(each for each in types if not isinstance(each, inspect.NoneType)), path)
        case _:
            yield from _leaf_problems(data, info, path)


def _struct_problems(data: Any, info: inspect.StructType, path: str, *, partial: bool) -> Iterator[str]:
    names = [field.encode_name for field in info.fields]
    below = f"{path}." if path else ""
    if not isinstance(data, Mapping):
        yield f"{path or 'the text'}: {shown(data)}: an object is expected; its fields are {', '.join(names)}"
        return
    for key in data:
        if key not in names:
            yield f"{below}{key}: no such field; {suggestion(str(key), names, below)}"
    for field in info.fields:
        if field.encode_name in data:
            yield from _problems(data[field.encode_name], field.type, f"{below}{field.encode_name}")
        elif field.required and not partial:
            yield f"{below}{field.encode_name}: is required; add it"


def _leaf_problems(data: Any, info: inspect.Type, path: str) -> Iterator[str]:
    if isinstance(info, inspect.LiteralType):
        if data not in info.values:
            yield f"{path}: {shown(data)} is not one of {', '.join(map(str, info.values))}; use one of them"
        return
    if type(info) not in _LEAVES:
        return
    kinds, expected = _LEAVES[type(info)]
    if isinstance(data, kinds) and (kinds == (bool,) or not isinstance(data, bool)):
        return
    if kinds == (int,) and _BYTES_FIELD.fullmatch(path):
        expected = "a whole number of bytes, such as 40000000000, or a quantity such as 40Gi"
    hint = "; YAML takes 1e9 for text: write 1.0e+9" if _is_exponent(data) else ""
    yield f"{path}: {shown(data)}: {expected} is expected{hint}"


def _is_exponent(data: Any) -> bool:
    return isinstance(data, str) and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", data) is not None
