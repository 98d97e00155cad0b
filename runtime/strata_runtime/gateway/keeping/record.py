"""One answer that is kept: every token of it in the order in which they came, whoever made them, and who reads it now.

Made by `keeper`. Whoever reads it reads it from its beginning, so that all see the same answer; its text is made of its tokens alone. Knows no
HTTP and no sockets.
"""

import asyncio
from collections.abc import Callable, Iterator

import msgspec

from strata_planner.contract.frames import TokenEvent
from strata_runtime.gateway.errors import ApiError
from strata_runtime.gateway.keeping.birth import Birth
from strata_runtime.gateway.keeping.positions import Named, Trace
from strata_runtime.gateway.routing.generation import Generation

ENTRY_BYTES = 100  # what a token takes here beside its encoding

_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(tuple[int, TokenEvent])


class Record:
    """`key`: of whom it is and under which name; `body`: a digest of what was asked. `owner`: the gateway whose leaders make it."""

    def __init__(self, key: bytes, body: bytes, birth: Birth, choices: int, owner: str, term: int = 0) -> None:
        self.key = key
        self.body = body
        self.birth = birth
        self.owner = owner
        self.term = term  # how often another gateway has taken it over
        self.entries: list[bytes] = []
        self.size = self.counted = 0  # bytes, about; those that the keeper has counted
        self.unfinished = set(range(choices))
        self.choices = choices
        self.failure: ApiError | None = None
        self.generation: Generation | None = None  # while this gateway's leaders make it,
        self.running: list[int] = []  # these choices of it
        self.readers: set[Reader] = set()
        self.touched_at = 0.0
        self.ending: asyncio.TimerHandle | None = None

    @property
    def is_done(self) -> bool:
        return not self.unfinished

    @property
    def name(self) -> bytes:
        """Tells it from every other answer, also from one under the same key."""
        return self.key + self.birth.name.encode()

    def add(self, choice: int, event: TokenEvent) -> bytes | None:
        """The next token, as it is kept; None behind the end of its choice."""
        return self.add_entry(_encode((choice, msgspec.structs.replace(event, request=""))), choice, event)

    def add_kept(self, entry: bytes) -> None:
        """The same as another gateway has kept it."""
        self.add_entry(entry, *_decoder.decode(entry))

    def add_entry(self, entry: bytes, choice: int, event: TokenEvent) -> bytes | None:
        if choice not in self.unfinished:
            return None
        self.entries.append(entry)
        self.size += len(entry) + ENTRY_BYTES
        if event.finish is not None:
            self.unfinished.discard(choice)
        self.wake()
        return entry

    def finish(self, choice: int) -> bool:
        """A reader has found the end of a choice in its text; whether that is news."""
        if choice not in self.unfinished:
            return False
        self.unfinished.discard(choice)
        return True

    def fail(self, error: ApiError) -> None:
        self.failure = error
        self.wake()

    def wake(self) -> None:
        for reader in self.readers:
            reader.woken.set()

    def events(self) -> Iterator[tuple[int, TokenEvent]]:
        return map(_decoder.decode, self.entries)

    def tokens_of(self, choice: int) -> tuple[int, ...]:
        return tuple(event.token for each, event in self.events() if each == choice)

    def named(self, start: int, end: int) -> list[Named]:
        """Tokens of the answer, from one place to another."""
        return [name_of(*_decoder.decode(entry)) for entry in self.entries[start:end]]


def name_of(choice: int, event: TokenEvent) -> Named:
    return choice, event.token, event.finish


class Reader:
    """A client that reads a record, as it would a `Generation`. Close it whatever happens."""

    def __init__(self, record: Record, finish: Callable[[Record, int], None], left: Callable[[Record], None]) -> None:
        """`finish`: the client has enough of a choice. `left`: nobody else may read this now."""
        self.record = record
        self.woken = asyncio.Event()
        self.place = 0  # entries that it has read
        self.trace = Trace()
        self._finish, self._left = finish, left
        record.readers.add(self)

    async def next(self) -> tuple[int, TokenEvent]:
        """The next event and its choice. Raises ApiError where no more can come."""
        while self.place >= len(self.record.entries):
            if self.record.failure is not None:
                raise self.record.failure
            self.woken.clear()
            await self.woken.wait()
        choice, event = _decoder.decode(self.record.entries[self.place])
        self.place += 1
        self.trace.add(name_of(choice, event))
        return choice, event

    def finish(self, index: int, reason: str = "stop") -> None:  # noqa: ARG002 (as a generation has it)
        self._finish(self.record, index)

    def close(self) -> None:
        if self in self.record.readers:
            self.record.readers.discard(self)
            self._left(self.record)
