"""What a client asks of its answer beside the body: that it be kept under an Idempotency-Key, and where it goes on.

Made by `app`, used by `answers`.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from strata_planner.contract.frames import TokenEvent
from strata_runtime.gateway.errors import ConflictError, InvalidRequestError
from strata_runtime.gateway.http.bodies import MOST_SHOWN
from strata_runtime.gateway.keeping.birth import Birth
from strata_runtime.gateway.keeping.keeper import Keeper, Wish
from strata_runtime.gateway.keeping.positions import read
from strata_runtime.gateway.keeping.record import Reader
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.routing.journal import GenerationRequest

LONGEST_KEY = 255
KEY_HEADER, POSITION_HEADER = "Idempotency-Key", "Last-Event-ID"


class Source(Protocol):
    """Where the events of an answer's choices come from."""

    async def next(self) -> tuple[int, TokenEvent]: ...

    def finish(self, index: int) -> None: ...

    def close(self) -> None: ...


class Asked(Protocol):
    """One call. `events_seen`: of its stream the client has so many already."""

    @property
    def events_seen(self) -> int: ...

    def open(self, requests: Sequence[GenerationRequest]) -> Source: ...

    def id_line(self, number: int) -> bytes:
        """What stands before the event with this number, from 1 on."""
        ...


class Once:
    """An answer that ends with the connection it is read on."""

    events_seen = 0

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def open(self, requests: Sequence[GenerationRequest]) -> Source:
        return self._dispatcher.open(requests)

    def id_line(self, number: int) -> bytes:  # noqa: ARG002
        return b""


class Again:
    """An answer that may be asked for again."""

    def __init__(self, keeper: Keeper, wish: Wish, birth: Birth) -> None:
        self._keeper, self._wish, self._birth = keeper, wish, birth
        self._reader: Reader | None = None

    @property
    def events_seen(self) -> int:
        return 0 if self._wish.after is None else self._wish.after.events

    def open(self, requests: Sequence[GenerationRequest]) -> Source:
        self._reader = self._keeper.open(self._wish, self._birth, requests)
        if self._reader is None:
            raise ConflictError(
                f"{KEY_HEADER}: a request under this key has just come on another connection: send this one again to read the same answer",
                code="request_in_progress",
            )
        return self._reader

    def id_line(self, number: int) -> bytes:
        assert self._reader is not None, "it is open"
        return b"id: " + self._keeper.event_id(self._reader, number).encode() + b"\n"


def wish_of(headers: Mapping[str, str], path: str, data: bytes, tenant: bytes) -> Wish | None:
    """None for an answer that is not to be kept. `tenant`: whose keys these are. Raises InvalidRequestError."""
    name, last = headers.get(KEY_HEADER), headers.get(POSITION_HEADER)
    if name is None:
        if last is not None:
            raise InvalidRequestError(
                f"{POSITION_HEADER}: a stream is gone on with only under the {KEY_HEADER} that it was begun with: send both, and the same body",
                param=POSITION_HEADER,
            )
        return None
    if not re.fullmatch(rf"[!-~]([ -~]{{0,{LONGEST_KEY - 2}}}[!-~])?", name):
        raise InvalidRequestError(
            f"{KEY_HEADER}={name[:MOST_SHOWN]!r} is not valid: send 1 to {LONGEST_KEY} printable ASCII characters that nobody guesses, a UUID say",
            param=KEY_HEADER,
        )
    after = None if last is None else read(last)
    if last is not None and after is None:
        raise InvalidRequestError(
            f"{POSITION_HEADER}={last[:MOST_SHOWN]!r} is no id of an event of this server: send the last one that came, as it came",
            param=POSITION_HEADER,
        )
    return Wish(_digest(tenant, name.encode()), _digest(path.encode(), data), after)


def _digest(one: bytes, other: bytes) -> bytes:
    return hashlib.sha256(len(one).to_bytes(4) + one + other).digest()
