"""One client call under way: its running requests, and where their events wait to be read.

Made by `dispatcher`, read by `answers`. Knows neither leaders nor replicas.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from strata_planner.contract.frames import TokenEvent
from strata_runtime.gateway.errors import ApiError, RequestFailedError
from strata_runtime.gateway.metrics import Metrics
from strata_runtime.gateway.routing.journal import GenerationRequest

Put = Callable[[int, TokenEvent | ApiError], None]  # an event of the request with this index


class RunningAnswer:
    """One running request: where its events go and when they came."""

    def __init__(self, generation: "Generation", index: int, request: GenerationRequest) -> None:
        self.generation = generation
        self.index = index
        self.prompt_tokens = len(request.prompt)
        self._begun_tokens = len(request.begun)
        self.opened_at = time.monotonic()
        self.first_at = 0.0
        self.last_at = 0.0
        self.tokens = 0
        self.held_since: float | None = None
        self.ending: asyncio.TimerHandle | None = None  # at the deadline

    @property
    def waits_since(self) -> float:
        """Its client, for the next token."""
        return self.last_at or self.opened_at

    @property
    def known_tokens(self) -> int:
        """Of its prompt and of what its client has."""
        return self.prompt_tokens + self._begun_tokens + self.tokens

    def observe(self, metrics: Metrics, found: int) -> None:
        """A token has come; `found`: tokens of the prompt and of what was delivered that were in the KV cache."""
        now = time.monotonic()
        if self.tokens == 0:
            self.first_at = now
            metrics.first_token(now - self.opened_at, self.prompt_tokens, min(found, self.prompt_tokens))
        else:
            metrics.next_token(now - self.last_at)
        self.tokens += 1
        self.last_at = now

    def finished(self, metrics: Metrics, reason: str) -> None:
        per_token = (self.last_at - self.first_at) / (self.tokens - 1) if self.tokens > 1 else None
        metrics.finished(reason, time.monotonic() - self.opened_at, per_token)


class Generation:
    """The running requests of one client call, their events in one queue. Close it whatever happens."""

    def __init__(
        self, finish: Callable[[str, str], None], requests: Sequence[GenerationRequest], put: Put | None = None
    ) -> None:
        """`finish`: the dispatcher's, which forgets a request for a reason. `put`: takes the events, in place of the queue."""
        self._finish = finish
        self._ids = [request.id for request in requests]
        self._queue: asyncio.Queue[tuple[int, TokenEvent | ApiError]] = asyncio.Queue()
        self.put: Put = put or self._put

    def _put(self, index: int, event: TokenEvent | ApiError) -> None:
        self._queue.put_nowait((index, event))

    async def next(self) -> tuple[int, TokenEvent]:
        """The next event and the index of its request. Raises ApiError when one of them failed."""
        index, event = await self._queue.get()
        if isinstance(event, ApiError):
            raise event
        return index, event

    def finish(self, index: int, reason: str = "stop") -> None:
        """The client has enough of this request. Nothing happens if it has ended."""
        self._finish(self._ids[index], reason)

    def is_unread(self, most: int) -> bool:
        """The client has left more than `most` events of each answer where they are."""
        return self._queue.qsize() > most * len(self._ids)

    def give_up(self, most: int) -> None:
        """End what still runs; the client finds the reason after what it has not read yet."""
        reason = f"the client left more than {most} events of an answer unread (--max-unread-events): read it faster"
        self.put(0, RequestFailedError(reason, code="unread_events"))
        self.close()

    def close(self) -> None:
        """The client is gone or has all."""
        for index in range(len(self._ids)):
            self.finish(index, "abort")
