"""A small client of the OpenAI endpoint, with the standard library alone: streams a chat, drives the planned load.

Used by the demo to show text and to put measured figures beside predicted ones.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Measured:
    """What a client saw: tokens of all answers, seconds from the first question to the last token."""

    tokens: int
    seconds: float
    first_token_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def seconds_per_token(self) -> float:
        """Of one stream, after its first token."""
        return (self.seconds - self.first_token_seconds) / max(1, self.tokens - 1)


def stream_chat(url: str, model: str, question: str, max_tokens: int, show: Callable[[str], object]) -> Measured:
    """Ask one question; `show` gets each piece of text as it comes."""
    started = time.monotonic()
    first = 0.0
    tokens = 0
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for event in _events(f"{url}/v1/chat/completions", body):
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                first = first or time.monotonic() - started
                show(text)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Measured(tokens, time.monotonic() - started, first)


def drive(url: str, model: str, concurrency: int, prompt_tokens: int, output_tokens: int) -> Measured:
    """The load that a plan was made for: `concurrency` prompts of token ids at once, all answers at full length."""

    def one(number: int) -> float:
        body = {
            "model": model,
            "prompt": [3 + (number + place) % 200 for place in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        begun = time.monotonic()
        first = 0.0
        for _ in _events(f"{url}/v1/completions", body):
            first = first or time.monotonic() - begun
        return first

    started = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        firsts = list(threads.map(one, range(concurrency)))
    return Measured(concurrency * output_tokens, time.monotonic() - started, sum(firsts) / concurrency)


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of one answer."""
    request = urllib.request.Request(  # noqa: S310  an http address of our own
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310  same
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)
