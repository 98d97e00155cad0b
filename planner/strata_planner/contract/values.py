"""The base of every value that crosses a border of Strata: frozen, strict, camelCase on the wire.

Used by every module of the contract. Knows nothing of what the values mean.
"""

from typing import Any, TypeVar

import msgspec


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """An immutable value; unknown fields are refused when it is decoded."""


class ContractError(ValueError):
    """A message or file does not follow the contract. Fix the sender; retrying does not help."""


V = TypeVar("V")


def to_json(value: Value) -> bytes:
    return msgspec.json.encode(value)


def from_json(data: bytes | str, kind: type[V]) -> V:
    """Decode and check JSON. Raises ContractError with the path of the offending field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # msgspec lets the latter through
        raise ContractError(f"not a valid {kind.__name__}: {error}") from error


def from_builtins(data: Any, kind: type[V]) -> V:
    """The same for what YAML or JSON has already turned into dicts and lists."""
    try:
        return msgspec.convert(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ContractError(f"not a valid {kind.__name__}: {error}") from error
