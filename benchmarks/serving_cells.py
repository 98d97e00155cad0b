"""What is asked of a server over HTTP, of ours and of others alike: each cell is a load, and gives one figure. Used by `benchmarks.serving_peers`."""

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from benchmarks.load.streams import Seen, stream
from benchmarks.peers.http_servers import NAME, Serving
from benchmarks.serving_load import (
    BESIDE,
    CHAT_LENGTH,
    CHAT_TOKENS,
    CHATS,
    LARGE,
    PREFIX,
    SCHEMA,
    SHARING,
    SMALL,
    STREAMS,
    answer_tokens,
    drawn_prompt,
    passage,
)

FIRSTS_SECONDS = 60.0  # by which chats must have their first token
SMALL_SECONDS = 45.0  # after which a small prompt counts as having waited so long
HEAD_START_SECONDS = 0.5  # of a large prompt
STREAM_TOKENS, BEFORE = 2000, 40

_seeds = itertools.count(1)  # prompts of one run share nothing with any before


class CellError(Exception):
    """A server that refused what a cell asks."""


def prefix_ttft(server: Serving) -> float:
    """Mean seconds to the first token of requests that come together over a prefix that nobody has seen."""
    shared = drawn_prompt(PREFIX, next(_seeds))
    bodies = [body([*shared, *drawn_prompt(16, next(_seeds))], 1) for _ in range(SHARING)]
    return statistics.mean(seen.firsts[0] for seen in _to_their_end(server.port, bodies))


def chat_capacity(server: Serving) -> float:
    """Chats that may take all that is left of their context: how many stream once each that gets there has its first token."""

    async def run() -> int:
        bodies = [body(drawn_prompt(CHAT_TOKENS, next(_seeds)), CHAT_LENGTH - CHAT_TOKENS) for _ in range(CHATS)]
        async with _streams(server.port, bodies) as seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRSTS_SECONDS):
                    await _until(seen, lambda: all(each.moments for each in seen))
            _check(seen)
            since = time.perf_counter()
            await asyncio.sleep(1)  # one that was put off to make room for another is silent
            return sum(bool(each.moments) and each.moments[-1] > since for each in seen)

    return asyncio.run(run())


def short_behind_long(server: Serving) -> float:
    """Seconds to the first token of a small prompt that comes while a large one is computed."""

    async def run() -> float:
        async with _streams(server.port, [body(drawn_prompt(LARGE, next(_seeds)), 1)]) as large:
            await asyncio.sleep(HEAD_START_SECONDS)
            async with _streams(server.port, [body(drawn_prompt(SMALL, next(_seeds)), 1)]) as small:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SMALL_SECONDS):
                        await _until(small, lambda: bool(small[0].moments))
                _check([*large, *small])
                return small[0].firsts[0] if small[0].firsts else SMALL_SECONDS

    return asyncio.run(run())


def stall(server: Serving) -> float:
    """The longest gap of running streams from when a prompt comes until its first token, seconds."""

    async def run() -> float:
        bodies = [body(drawn_prompt(64, next(_seeds)), STREAM_TOKENS) for _ in range(STREAMS)]
        async with _streams(server.port, bodies) as seen:
            await _until(seen, lambda: all(len(each.moments) >= BEFORE for each in seen))
            sent = time.perf_counter()
            async with _streams(server.port, [body(drawn_prompt(BESIDE, next(_seeds)), 1)]) as large:
                await _until([*seen, *large], lambda: bool(large[0].moments))
                until = large[0].moments[0]
                last = len(seen[0].moments)
                await _until(seen, lambda: len(seen[0].moments) > last)  # a gap that the prompt's end is in
            _check([*seen, *large])
        pairs = [pair for each in seen for pair in itertools.pairwise(each.moments)]
        return max(later - one for one, later in pairs if later >= sent and one <= until)

    return asyncio.run(run())


def quoting(server: Serving) -> float:
    """Tokens a second of one greedy answer that repeats what it was asked."""
    return _tokens_per_second(server.port, [body(passage(0, drawn=False), answer_tokens(1))])


def structured(streams: int, server: Serving) -> float:
    """Tokens a second of greedy answers that are held to a JSON schema and longer than they may be."""
    schema = json.loads(SCHEMA)
    form: object = {"json": schema} if server.form == "structured_outputs" else schema
    bodies = []
    for seed in range(streams):
        asked = body(passage(seed, drawn=False), answer_tokens(streams), **{server.form: form})
        del asked["ignore_eos"]  # the schema has no end by then
        bodies.append(asked)
    return _tokens_per_second(server.port, bodies)


def body(prompt: Sequence[int], answer: int, **more: object) -> dict[str, object]:
    """As OpenAI's completions take it, and what servers add."""
    plain = {"model": NAME, "prompt": list(prompt), "max_tokens": answer, "temperature": 0, "stream": True}
    return {**plain, "ignore_eos": True, **more}


def _tokens_per_second(port: int, bodies: Sequence[Mapping[str, object]]) -> float:
    started = time.perf_counter()
    _to_their_end(port, bodies)
    return sum(int(str(each["max_tokens"])) for each in bodies) / (time.perf_counter() - started)


def _to_their_end(port: int, bodies: Sequence[Mapping[str, object]]) -> list[Seen]:
    async def run() -> list[Seen]:
        async with _streams(port, bodies) as seen:
            await _until(seen, lambda: all(each.ended for each in seen))
        return seen

    return asyncio.run(run())


@asynccontextmanager
async def _streams(port: int, bodies: Sequence[Mapping[str, object]]) -> AsyncIterator[list[Seen]]:
    """All at once; those that still run on exit are closed, which servers take as their end."""
    seen = [Seen() for _ in bodies]
    tasks = [
        asyncio.create_task(stream(port, json.dumps(each).encode(), heard))
        for each, heard in zip(bodies, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until(seen: Sequence[Seen], told: Callable[[], bool]) -> None:
    while not told():
        _check(seen)
        await asyncio.sleep(0.002)


def _check(seen: Sequence[Seen]) -> None:
    if failed := [reason for each in seen for reason in each.failed]:
        raise CellError(f"{len(failed)} of {len(seen)} streams failed: {failed[0]}")
