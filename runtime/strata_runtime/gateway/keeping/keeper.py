"""The keeper: answers under a client's Idempotency-Key, kept while they are made and for a while after.

One per gateway. A client whose connection broke, or that is not sure of its request, sends it again under the same key: what is being made is gone on
with, what is done is told again, nothing is made twice. What this gateway keeps its twins keep too (`twins`): each can take over what another
made. Used by `app`; decides nothing about tokens.
"""

import asyncio
import secrets
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from strata_planner.contract.frames import TokenEvent
from strata_runtime.gateway.errors import (
    ApiError,
    ConflictError,
    GoneError,
    RequestFailedError,
    ReusedKeyError,
    TooManyRequestsError,
    UnavailableError,
)
from strata_runtime.gateway.keeping.birth import Birth
from strata_runtime.gateway.keeping.changes import Begun, Change, Dropped, Ended, Grown
from strata_runtime.gateway.keeping.positions import Named, Position, Trace, is_of, told
from strata_runtime.gateway.keeping.record import Reader, Record
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.routing.journal import GenerationRequest
from strata_runtime.gateway.settings import Limits

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Wish:
    """That an answer be kept. `key`: of whom and under which name, `body`: what was asked, both as digests. `after`: what the client has."""

    key: bytes
    body: bytes
    after: Position | None = None


class Twins(Protocol):
    """The other gateways."""

    @property
    def knows_all(self) -> bool:
        """Whether they have told what they keep, since this one began."""
        ...

    def forget_all_but(self, keys: Container[bytes]) -> None:
        """The others are asked for no more."""
        ...

    def tell(self, change: Change) -> None: ...

    def confirmed(self, key: bytes, of: int) -> int:
        """How many of these tokens every one of them has that can be reached; all, where there is none."""
        ...


class Alone:
    """No other gateway."""

    knows_all = True

    def forget_all_but(self, keys: Container[bytes]) -> None: ...

    def tell(self, change: Change) -> None: ...

    def confirmed(self, key: bytes, of: int) -> int:  # noqa: ARG002
        return of


class Keeper:
    """Create it inside the event loop; `close` it there."""

    def __init__(self, dispatcher: Dispatcher, limits: Limits, secret: bytes) -> None:
        """`secret`: signs positions; that of all gateways of a deployment."""
        self.twins: Twins = Alone()
        self._dispatcher = dispatcher
        self._limits = limits
        self._secret = secret
        self._own = dispatcher.incarnation
        self._records: dict[bytes, Record] = {}  # the one touched longest ago first
        self._size = 0
        self._clock = asyncio.get_running_loop().time
        self._housekeeper = asyncio.create_task(self._keep_house(), name="kept answers")

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self._size

    def __len__(self) -> int:
        return len(self._records)

    def birth(self, wish: Wish) -> Birth:
        """Of what is kept under this key, or of a new answer. Raises ReusedKeyError, GoneError; UnavailableError while others may know of it."""
        record = self._records.get(wish.key)
        if record is None:
            if not self.twins.knows_all:
                raise UnavailableError(
                    "this gateway has just begun, and others have not told it yet what they keep under an Idempotency-Key: "
                    f"send the request again in {UnavailableError.retry_after_seconds} s"
                )
            if wish.after is not None:
                raise GoneError(
                    "Last-Event-ID: nothing is kept under this Idempotency-Key: it was never asked here, or ended or was left so long ago "
                    f"(--keep-seconds {self._limits.keep_seconds:g}, --resume-seconds {self._limits.resume_seconds:g}) that it is "
                    "forgotten; send the request without Last-Event-ID, under another key",
                    code="stream_not_found",
                )
            return Birth.new(self._dispatcher.status().epoch)
        if record.body != wish.body:
            raise ReusedKeyError(
                "Idempotency-Key: another request was sent under this key: send the same body to the same path again, or another key",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        return record.birth

    def open(self, wish: Wish, birth: Birth, requests: Sequence[GenerationRequest]) -> Reader | None:
        """Read the answer, which is made if nobody makes it. None: another of this key came first; ask for the birth again.

        Raises what `Dispatcher.open` does, and GoneError for a position that this answer cannot be gone on with from.
        """
        record = self._records.get(wish.key)
        if record is None:
            if wish.after is not None:
                return None
            self._check_room()
            record = Record(wish.key, wish.body, birth, len(requests), self._own)
            self._run(record, requests)
            self._records[wish.key] = record
            self._touch(record)
            self._tell_whole(record)
        elif record.birth != birth:
            return None
        if wish.after is not None:
            self._check_position(record, wish.after)
        if record.generation is None and not record.is_done:
            self._take_over(record, requests)
        record.stay()
        return Reader(record, self._finish, self._left)

    def event_id(self, reader: Reader, events: int) -> str:
        """Of the event with this number, from 1 on, which was made of all that was read."""
        record, place = reader.record, reader.place
        start = min(place, self.twins.confirmed(record.key, place))
        return told(self._secret, record.name, reader.trace, events, place, record.named(start, place))

    async def close(self) -> None:
        self._housekeeper.cancel()
        await asyncio.gather(self._housekeeper, return_exceptions=True)
        for record in self._records.values():
            record.stay()

    # What the other gateways tell

    def hear(self, change: Change, owner: str) -> None:
        """What another gateway has made. Of two that make one answer, the one that took it over last goes on."""
        record = self._records.get(change.key)
        match change:
            case Begun():
                if record is None or record.owner == owner or _is_newer(change, record):
                    self._replace(record, change, owner)
            case _ if record is None or record.owner != owner:
                return
            case Grown(first=first, entries=entries):
                for entry in entries[max(0, len(record.entries) - first) :]:
                    record.add_kept(entry)
                self._touch(record)
            case Ended(choice=choice):
                record.finish(choice)
                self._touch(record)
            case Dropped():
                self._drop(record)

    def kept(self) -> Iterator[tuple[str, Change]]:
        """All that it keeps, also of gateways that are no more, each behind who makes it or made it."""
        for record in list(self._records.values()):
            for change in _changes_of(record):
                yield record.owner, change

    def _replace(self, record: Record | None, begun: Begun, owner: str) -> None:
        if record is not None:
            reason = "another gateway goes on with this answer, for a request under the same Idempotency-Key: send this one again to read it"
            self._stop(record, ConflictError(reason, code="taken_over"))
            self._drop(record)
        new = Record(begun.key, begun.body, begun.birth, begun.choices, owner, begun.term)
        self._records[begun.key] = new
        self._touch(new)

    # Own answers

    def _check_room(self) -> None:
        bound = self._limits.max_kept_bytes
        self._forget_beyond(bound)
        if (size := self.size) > bound:
            raise TooManyRequestsError(
                f"answers under an Idempotency-Key hold {size} bytes, the bound is {bound} (--max-kept-bytes): send it later, or without a key",
                code="queue_full",
            )

    def _check_position(self, record: Record, after: Position) -> None:
        """What the client has seen and this gateway has not is in the position itself."""
        missing = after.tokens - len(record.entries)
        if 0 < missing <= len(after.newest) and record.generation is None and not record.is_done:
            known = record.named(0, len(record.entries))
            trace = Trace([*known, *after.newest[len(after.newest) - missing :]])
            if is_of(after, self._secret, record.name, trace):
                for named in after.newest[len(after.newest) - missing :]:
                    _add_named(record, named)
                return
        elif missing <= 0 and is_of(after, self._secret, record.name, Trace(record.named(0, after.tokens))):
            return
        raise GoneError(
            "Last-Event-ID is no position that this answer can be gone on with from: it was made elsewhere and its newest tokens are lost, or the id "
            "is of another answer; send the request without it, under another Idempotency-Key",
            code="stream_lost",
        )

    def _take_over(self, record: Record, requests: Sequence[GenerationRequest]) -> None:
        """Go on with what another gateway has begun: from its tokens, under names that no leader knows yet."""
        self._run(record, requests, suffix=f"~{secrets.token_hex(4)}")
        record.owner, record.term = self._own, record.term + 1
        self._touch(record)
        self._tell_whole(record)

    def _run(self, record: Record, requests: Sequence[GenerationRequest], suffix: str = "") -> None:
        choices = sorted(record.unfinished)
        wanted = [
            replace(requests[choice], id=f"{requests[choice].id}{suffix}", begun=record.tokens_of(choice))
            for choice in choices
        ]

        def put(index: int, event: TokenEvent | ApiError) -> None:
            self._made(record, choices[index], event)

        record.generation, record.running = self._dispatcher.open(wanted, put), choices

    def _made(self, record: Record, choice: int, event: TokenEvent | ApiError) -> None:
        if isinstance(event, ApiError):
            self._give_up(record, event)
            return
        first = len(record.entries)
        entry = record.add(choice, event)
        if entry is not None:
            self.twins.tell(Grown(record.key, first, [entry]))
            self._touch(record)
            if record.is_done:  # it is kept for its own time, whoever has left it
                record.stay()
            self._forget_beyond(self._limits.max_kept_bytes)

    def _finish(self, record: Record, choice: int) -> None:
        if record.finish(choice):
            if record.generation is not None:
                record.generation.finish(record.running.index(choice))
            self.twins.tell(Ended(record.key, choice))
            self._touch(record)

    def _left(self, record: Record) -> None:
        """Nobody reads it: somebody may come back."""
        if not record.readers and record.generation is not None and not record.is_done:
            loop = asyncio.get_running_loop()
            record.ending = loop.call_later(self._limits.resume_seconds, self._abandon, record)

    def _abandon(self, record: Record) -> None:
        self._give_up(record, RequestFailedError("its client did not come back"))

    def _give_up(self, record: Record, error: ApiError) -> None:
        """A request under its key is a new one from here on. One that ends with this gateway is left to the twins."""
        self._stop(record, error)
        if self._drop(record) and not self._dispatcher.is_closing:
            self.twins.tell(Dropped(record.key))

    def _stop(self, record: Record, error: ApiError) -> None:
        record.fail(error)
        record.stay()
        generation, record.generation = record.generation, None
        if generation is not None:
            generation.close()

    def _tell_whole(self, record: Record) -> None:
        for change in _changes_of(record):
            self.twins.tell(change)

    # Bounds

    def _touch(self, record: Record) -> None:
        record.touched_at = self._clock()
        if self._records.get(record.key) is record:
            self._records[record.key] = self._records.pop(record.key)
            self._size += record.size - record.counted
            record.counted = record.size

    def _drop(self, record: Record) -> bool:
        """Whether it was there."""
        if self._records.get(record.key) is not record:
            return False
        del self._records[record.key]
        self._size -= record.counted
        return True

    def _forget_beyond(self, most: int) -> None:
        """Those first that were touched longest ago, of all that nobody here makes."""
        for record in list(self._records.values()) if self._size > most else ():
            if self._size > most and (record.is_done or record.generation is None):
                self._drop(record)

    def forget_old(self) -> None:
        """What is complete for long enough, and what its own gateway would have said more of by now."""
        now, silent = self._clock(), self._limits.hold_seconds + self._limits.resume_seconds
        for record in list(self._records.values()):
            patience = self._limits.keep_seconds if record.is_done else silent
            if now - record.touched_at > patience and (record.is_done or record.generation is None):
                self._drop(record)
        self.twins.forget_all_but(self._records)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.forget_old()


def _is_newer(begun: Begun, record: Record) -> bool:
    """It was taken over, or asked for anew where nobody had this one any more."""
    return record.term < begun.term or (record.is_done and record.birth.at < begun.birth.at)


def _changes_of(record: Record) -> Iterator[Change]:
    yield Begun(record.key, record.body, record.birth, record.choices, record.term)
    if record.entries:
        yield Grown(record.key, 0, list(record.entries))
    ended = {choice for choice, event in record.events() if event.finish is not None}
    for choice in sorted(set(range(record.choices)) - record.unfinished - ended):
        yield Ended(record.key, choice)


def _add_named(record: Record, named: Named) -> None:
    """A token of which its client has seen all else that was told."""
    choice, token, finish = named
    record.add(choice, TokenEvent("", len(record.tokens_of(choice)), token, 0.0, [], finish))
