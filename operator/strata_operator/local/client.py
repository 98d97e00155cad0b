"""A small client of the OpenAI endpoint, with the standard library alone: streams a chat, drives the planned load.

Used by the demo to show text and to put measured figures beside predicted ones.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any
from uuid import uuid4

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


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request: when it was sent and when the answer was there, in seconds, and its tokens."""

    begun: float
    ended: float
    tokens: int

    def within(self, begin: float, end: float) -> float:
        """Tokens that came between these moments, as if they came evenly."""
        inside = max(0.0, min(end, self.ended) - max(begin, self.begun))
        return self.tokens * inside / (self.ended - self.begun)


def steady_rate(clients: Sequence[Sequence[Answer]]) -> float:
    """Tokens a second while all clients were at it: from when all had their first answer to when the first of them had its last. With one answer
    each: of all the time.
    """
    begin, end = max(answers[0].ended for answers in clients), min(answers[-1].ended for answers in clients)
    if begin >= end:
        begin, end = min(answers[0].begun for answers in clients), max(answers[-1].ended for answers in clients)
    return sum(each.within(begin, end) for answers in clients for each in answers) / (end - begin)


def drive(url: str, model: str, concurrency: int, prompt_tokens: int, output_tokens: int, each: int = 1) -> float:
    """Tokens/s of the load that a plan was made for: `concurrency` clients, which send `each` prompts of token ids one after the other, all answers
    at full length. No prompt finds anything of another in the KV cache: plans are made for prompts that are computed.

    Answers come whole: on a small machine, hundreds of events a second would be measured instead of the pipeline.
    """

    def client(number: int) -> list[Answer]:
        found = []
        for _ in range(each):
            begun = time.monotonic()
            tokens = one(number)
            found.append(Answer(begun, time.monotonic(), tokens))
        return found

    def one(number: int) -> int:
        body = {
            "model": model,
            "prompt": [3 + (number + place) % 200 for place in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": uuid4().hex,
        }
        with _post(f"{url}/v1/completions", body) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(concurrency) as threads:
        return steady_rate(list(threads.map(client, range(concurrency))))


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
