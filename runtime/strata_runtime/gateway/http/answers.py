"""Runs a prepared request and answers it: whole, or as server-sent events while tokens come.

Called by `app`; the text of choices comes from `choice`, the JSON from a `Dialect`, the tokens from `dispatcher`.
"""

from collections.abc import AsyncIterator

import msgspec
from msgspec import Raw

from strata_runtime.gateway.errors import ApiError
from strata_runtime.gateway.http.asked import Asked, Source
from strata_runtime.gateway.http.dialect import Dialect, Json, Told, Usage
from strata_runtime.gateway.http.prompts import Prepared
from strata_runtime.gateway.text.choice import Choice, Piece
from strata_runtime.gateway.text.tokenizer import Tokenizer

_encode = msgspec.json.encode


class Answer:
    """One client call under way. `start` it, then take `whole` or `events`; `close` it whatever happens."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, prepared: Prepared, dialect: Dialect) -> None:
        self._asked = asked
        self._prepared = prepared
        self._dialect = dialect
        stops = self._prepared.body.stop_strings
        body, special = self._prepared.body, self._prepared.special_tokens
        self._choices = [
            Choice(tokenizer, stops, each.stop_tokens, min_tokens=body.min_tokens, special_tokens=special)
            for each in self._prepared.requests
        ]
        self._unfinished = len(self._choices)
        self._generation: Source | None = None
        self._first: tuple[int, Piece] | None = None

    async def start(self) -> None:
        """Hand the requests in and wait for the first piece: what fails until then is an HTTP status."""
        self._generation = self._asked.open(self._prepared.requests)
        self._first = await self._next(self._generation)

    async def whole(self) -> bytes:
        """The complete answer."""
        parts = [_Parts() for _ in self._choices]
        async for index, piece in self._pieces():
            parts[index].add(piece, self._dialect.heard(index, piece))
        return _encode(self._dialect.whole([own.told() for own in parts], self._usage()))

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events, from behind those that the client has. A failure in the midst of it is an event with an error,
        then the end; it has no id, so that a client may come back for what is behind the one before.
        """
        number = 0
        try:
            async for event in self._events():
                number += 1
                if number > self._asked.events_seen:
                    yield self._asked.id_line(number) + event
        except ApiError as error:
            yield self._dialect.failure(error)

    async def _events(self) -> AsyncIterator[bytes]:
        for event in self._dialect.opening(self._usage()):
            yield event
        async for index, piece in self._pieces():
            for event in self._dialect.piece(index, piece):
                yield event
        for event in self._dialect.ending(self._usage()):
            yield event

    def close(self) -> None:
        if self._generation is not None:
            self._generation.close()

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        assert self._generation is not None and self._first is not None, "start comes first"  # noqa: PT018
        yield self._first
        while self._unfinished:
            yield await self._next(self._generation)

    async def _next(self, generation: Source) -> tuple[int, Piece]:
        """The next piece; tokens of a choice that a stop string has ended are passed over."""
        while True:
            index, event = await generation.next()
            choice = self._choices[index]
            if choice.finished:
                continue
            piece = choice.push(event)
            if piece.finish_reason is not None:
                self._unfinished -= 1
                generation.finish(index)
            return index, piece

    def _usage(self) -> Usage:
        """Of `n` answers to one prompt the first is the one that tells what was cached: the others find what it computed."""
        cached = sum(choice.cached_tokens for choice in self._choices[:: self._prepared.body.n])
        return Usage(self._prepared.prompt_tokens, sum(choice.completion_tokens for choice in self._choices), cached)


class _Parts:
    """What a whole answer has of one choice. Log probabilities are encoded as they come: all at the end would take the event
    loop's turn from the other clients, and as objects they take ten times the memory.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._lists: dict[str, bytearray] = {}  # JSON, each without its end
        self._logprobs: Json | None = None
        self._last: Piece | None = None

    def add(self, piece: Piece, logprobs: Json | None) -> None:
        self._texts.append(piece.text)
        self._logprobs = logprobs
        self._last = piece
        for name, values in (logprobs or {}).items():
            if values:
                known = self._lists.setdefault(name, bytearray())
                known += (b"," if known else b"[") + _encode(values)[1:-1]

    def told(self) -> Told:
        logprobs = self._logprobs
        if logprobs is not None:
            logprobs = {**logprobs, **{name: Raw(known + b"]") for name, known in self._lists.items()}}
        assert self._last is not None, "an answer has a token"
        return Told("".join(self._texts), logprobs, self._last.finish_reason, self._last.stop_string)
