"""How an interface tells an answer: what `answers` asks of each, and what it tells them.

Implemented by `chunks` for OpenAI's completions and chat, and by the packages of the other interfaces. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from strata_runtime.gateway.errors import ApiError
from strata_runtime.gateway.text.choice import Piece

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached`: of the prompts, those whose keys and values were there already."""

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True, slots=True)
class Told:
    """A choice that is complete. `stop_string`: the one that ended it."""

    text: str
    logprobs: Json | None
    finish_reason: str | None
    stop_string: str | None


class Dialect(Protocol):
    """Of one answer, which is told whole or as events. A choice's pieces come in order; those of several are interleaved."""

    def heard(self, index: int, piece: Piece) -> Json | None:
        """A piece of a whole answer, as it comes. Its log probabilities: lists by name, and None where there is nothing to tell."""
        ...

    def whole(self, choices: Sequence[Told], usage: Usage) -> Json:
        """The complete answer. Its log probabilities are those that were `heard`, joined."""
        ...

    def opening(self, usage: Usage) -> Iterator[bytes]:
        """What a stream says before its first piece, of which `usage` counts the token already."""
        ...

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """What a stream says of a piece, which may have no text."""
        ...

    def ending(self, usage: Usage) -> Iterator[bytes]:
        """What a stream says behind its last piece."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        ...


def event(value: Json, name: str | None = None) -> bytes:
    """One server-sent event."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data
