"""Many clients at once, each with one stream after the other: when each piece came, and what went wrong. A process of its own runs it."""

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.attack.target import HOST

TEXT = Path("examples/models/strata-tiny/heldout.txt")
_PIECE, _ERROR = b"data: {", b'data: {"error"'
_LARGEST_LINE = 1 << 16


@dataclass
class Seen:
    """Of all clients, or of one stream. Gaps: seconds between neighbouring pieces of one stream. Moments: when each piece came."""

    tokens: int = 0
    ended: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of `once`


def run(port: int, model: str, clients: int, seconds: float, answer: int) -> Seen:
    """Streams that are under way when the time is over are left."""
    seen, words = Seen(), TEXT.read_text().split()
    asyncio.run(_run(seconds, [_client(port, model, number, words, answer, seen) for number in range(clients)], seen))
    return seen


def once(port: int, bodies: Sequence[Mapping[str, object]]) -> Seen:
    """All of these streams at once, each to its end."""
    seen = Seen()

    async def all_at_once() -> None:
        started = time.perf_counter()
        await asyncio.gather(*(stream(port, json.dumps(body).encode(), seen) for body in bodies))
        seen.seconds = time.perf_counter() - started

    asyncio.run(all_at_once())
    return seen


async def _run(seconds: float, clients: list[Coroutine[Any, Any, None]], seen: Seen) -> None:
    tasks = [asyncio.create_task(client) for client in clients]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            seen.failed.append(repr(outcome))


async def _client(port: int, model: str, number: int, words: list[str], answer: int, seen: Seen) -> None:
    for turn in range(1_000_000):
        start = (997 * number + 101 * turn) % (len(words) - 40)
        asked = {
            "model": model,
            "prompt": " ".join(words[start : start + 40]),
            "max_tokens": answer,
            "temperature": 1,
            "seed": number,
            "stream": True,
            "ignore_eos": True,
        }
        await stream(port, json.dumps(asked).encode(), seen)


async def stream(port: int, body: bytes, seen: Seen) -> None:
    """One, to its end. Cancelled, it closes the connection."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=_LARGEST_LINE)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        last = sent = time.perf_counter()
        status = await reader.readline()
        if b" 200 " not in status:
            seen.failed.append(status.decode().strip())
            await asyncio.sleep(1)
            return
        first = True
        async for line in reader:
            now = time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                seen.ended += 1
                return
            if not line.startswith(_PIECE):
                continue
            if line.startswith(_ERROR):
                seen.failed.append(line.decode()[:200])
                return
            if first:
                seen.firsts.append(now - sent)
            else:
                seen.gaps.append(now - last)
            first, last = False, now
            seen.moments.append(now)
            seen.tokens += 1
        seen.failed.append("the stream ended without [DONE]")
    finally:
        writer.close()
