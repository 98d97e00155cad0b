"""A small client of the OpenAI endpoint, with the standard library alone: streams a chat, drives the planned load.

Used by the demo to show text and to put measured figures beside predicted ones.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

TIMEOUT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Measured:
    """What a client saw of one stream."""

    tokens: int
    seconds: float
    first_token_seconds: float

    @property
    def seconds_per_token(self) -> float:
        """After the first."""
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


def drive(url: str, model: str, concurrency: int, prompt_tokens: int, output_tokens: int) -> float:
    """Tokens/s of the load that a plan was made for: `concurrency` prompts of token ids at once, all answers at full length.

    Answers come whole: on a small machine, hundreds of events a second would be measured instead of the pipeline.
    """

    def one(number: int) -> int:
        body = {
            "model": model,
            "prompt": [3 + (number + place) % 200 for place in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        with _post(f"{url}/v1/completions", body) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    started = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        tokens = sum(threads.map(one, range(concurrency)))
    return tokens / (time.monotonic() - started)


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of one answer."""
    with _post(url, body) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)


def _post(url: str, body: dict[str, Any]) -> HTTPResponse:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310  an http address of our own
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)  # noqa: S310  same
    return answer
