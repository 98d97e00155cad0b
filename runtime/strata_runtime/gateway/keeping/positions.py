"""Positions: what the `id` of a stream's event says, so that any gateway can go on behind it.

A position counts the events that were told and the tokens that they were made of. It names the newest of these tokens, those that the other gateways
had not confirmed when it was told: with them a gateway that was a little behind knows all that the client has seen. Signed by a
secret of the gateways, over every token that it counts: of an answer that went on otherwise elsewhere none is taken. Pure.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from strata_planner.contract.frames import FinishReason

MOST_NAMED = 256  # tokens: more are not confirmed only where no gateway is left that could go on
LONGEST_ID = 8192  # characters
_SIGNATURE_BYTES = 12

Named = tuple[int, int, FinishReason | None]  # choice, token, and how the choice ends with it


class _Said(msgspec.Struct, frozen=True, array_like=True):
    events: int
    tokens: int
    newest: tuple[Named, ...]


_decoder = msgspec.msgpack.Decoder(_Said)


@dataclass(frozen=True, slots=True)
class Position:
    """`newest`: the last of the `tokens` that came before it."""

    events: int
    tokens: int
    newest: tuple[Named, ...]
    signature: bytes
    said: bytes


class Trace:
    """A digest of all tokens of an answer so far, in the order in which they came."""

    def __init__(self, named: Iterable[Named] = ()) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        for each in named:
            self.add(each)

    def add(self, named: Named) -> None:
        self._digest.update(msgspec.msgpack.encode(named))

    def value(self) -> bytes:
        return self._digest.digest()


def told(secret: bytes, answer: bytes, trace: Trace, events: int, tokens: int, newest: Sequence[Named]) -> str:
    """The id of an event. `answer`: what tells it from all others."""
    said = msgspec.msgpack.encode(_Said(events, tokens, tuple(newest) if len(newest) <= MOST_NAMED else ()))
    return base64.urlsafe_b64encode(said + _signature(secret, answer, trace, said)).decode().rstrip("=")


def read(text: str) -> Position | None:
    """None for what no gateway has said."""
    if len(text) > LONGEST_ID:
        return None
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        said = _decoder.decode(data[:-_SIGNATURE_BYTES])
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None
    if not 0 <= len(said.newest) <= said.tokens or said.events < 0:
        return None
    return Position(said.events, said.tokens, said.newest, data[-_SIGNATURE_BYTES:], data[:-_SIGNATURE_BYTES])


def is_of(position: Position, secret: bytes, answer: bytes, trace: Trace) -> bool:
    """Whether it was said of this answer, with these tokens before it."""
    return hmac.compare_digest(position.signature, _signature(secret, answer, trace, position.said))


def _signature(secret: bytes, answer: bytes, trace: Trace, said: bytes) -> bytes:
    parts = (answer, trace.value(), said)
    return hmac.digest(secret, b"".join(len(part).to_bytes(4) + part for part in parts), "sha256")[:_SIGNATURE_BYTES]
