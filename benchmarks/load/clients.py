"""Clients of the soak: each asks for something whose answer is known, reads it or goes away in the middle, and compares."""

import itertools
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.attack.target import HOST

CLIENTS = 8
KINDS = 24
ABORTED = 1 / 3  # of the streams
TEXT = Path("examples/models/strata-tiny/heldout.txt")
_PATIENCE_SECONDS = 120.0
_CLEAR = (
    1e-3  # log probability by which every token of a reference must lead: rounding in another batch never changes it
)
_TRIES = 10 * KINDS


@dataclass(frozen=True)
class Asked:
    """A request and the tokens of each of its choices, as a quiet deployment gave them."""

    path: str
    body: dict[str, Any]
    tokens: tuple[tuple[str, ...], ...]
    texts: tuple[str, ...]

    def __str__(self) -> str:
        return json.dumps(self.body)[:100]


@dataclass
class Report:
    """What all clients saw."""

    requests: int = 0
    streams: int = 0
    aborted: int = 0
    tokens: int = 0
    tokens_wrong: int = 0
    longest_gap: float = 0.0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def references(port: int, model: str, seed: int) -> list[Asked]:
    """Requests of all kinds with their answers, each asked alone. Those in which two tokens nearly tie are left out."""
    rng = random.Random(seed)
    text = TEXT.read_text()
    found: list[Asked] = []
    with _client(port) as client:
        for number in range(_TRIES):
            path, body = _request(rng, model, text, number)
            answer = client.post(path, json={**body, **_two_most_likely(path), "stream": False})
            answer.raise_for_status()
            choices = answer.json()["choices"]
            if all(_is_clear(choice) for choice in choices):
                tokens = tuple(tuple(token for token, _ in _tokens(choice)) for choice in choices)
                found.append(Asked(path, body, tokens, tuple(_text(choice) for choice in choices)))
            if len(found) == KINDS:
                return found
    raise RuntimeError(f"only {len(found)} of {_TRIES} requests have answers without near ties: choose another seed")


def run(port: int, asked: Sequence[Asked], seconds: float, seed: int) -> Report:
    """All clients until the time is over; answers that are under way then are read to their end."""
    report = Report()
    lock = threading.Lock()
    until = time.monotonic() + seconds
    started = time.monotonic()

    def one(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        with _client(port) as client:
            while time.monotonic() < until:
                _ask(client, rng, rng.choice(asked), report, lock)

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(one, range(CLIENTS)))
    report.seconds = time.monotonic() - started
    return report


def _client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://{HOST}:{port}", timeout=_PATIENCE_SECONDS)


def _request(rng: random.Random, model: str, text: str, number: int) -> tuple[str, dict[str, Any]]:
    """Short and long prompts and answers, one choice or several, stop strings, both interfaces, streams and whole answers."""
    start = rng.randrange(len(text) - 1000)
    prompt = text[start : start + rng.choice((20, 60, 200, 600))]
    body: dict[str, Any] = {"model": model, "max_tokens": rng.choice((4, 20, 60, 120)), "temperature": 0}
    if number % 4 == 1:
        body["n"] = rng.choice((2, 3))
    if number % 4 == 2:
        body["stop"] = rng.choice(([" the", "\n\n"], [")"], ["self", "return"]))
    if number % 3:
        body["stream"] = True
    if number % 5 == 0:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}], "logprobs": True}
    return "/v1/completions", {**body, "prompt": prompt, "logprobs": 0, "ignore_eos": number % 2 == 0}


def _two_most_likely(path: str) -> dict[str, Any]:
    return {"logprobs": 2} if path == "/v1/completions" else {"top_logprobs": 2}


def _is_clear(choice: dict[str, Any]) -> bool:
    tops = choice["logprobs"].get("top_logprobs")
    if tops is None:
        leads = [[top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    else:
        leads = [list(top.values()) for top in tops]
    pairs = [sorted(each, reverse=True)[:2] for each in leads if len(each) > 1]
    return bool(pairs) and all(first - second > _CLEAR for first, second in pairs)


def _tokens(choice: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Tokens of a choice or of a chunk's choice, with the choice's number."""
    logprobs = choice.get("logprobs") or {}
    names = logprobs.get("tokens")
    if names is None:
        names = [token["token"] for token in logprobs.get("content") or ()]
    return ((name, choice["index"]) for name in names)


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


@dataclass
class _Got:
    """What came of one request."""

    tokens: list[list[str]]
    texts: list[str]
    longest_gap: float = 0.0
    whole: bool = False

    def take(self, event: dict[str, Any]) -> int:
        """Adds an event's tokens; how many."""
        count = 0
        for choice in event["choices"]:
            self.texts[choice["index"]] += _text(choice)
            for token, index in _tokens(choice):
                self.tokens[index].append(token)
                count += 1
        return count


def _ask(client: httpx.Client, rng: random.Random, asked: Asked, report: Report, lock: threading.Lock) -> None:
    streams = bool(asked.body.get("stream"))
    before_the_end = min(40, max(2, sum(map(len, asked.tokens))))
    abort_after = rng.randrange(1, before_the_end) if streams and rng.random() < ABORTED else None
    got = _Got([[] for _ in asked.tokens], ["" for _ in asked.tokens])
    failure = ""
    try:
        if streams:
            _read_stream(client, asked, got, abort_after)
        else:
            answer = client.post(asked.path, json=asked.body)
            answer.raise_for_status()
            got.take(answer.json())
            got.whole = True
    except (httpx.HTTPError, ValueError, KeyError) as error:
        failure = f"{asked}: {type(error).__name__} {error}"
    wrong = _wrong_tokens(asked, got)
    with lock:
        report.requests += 1
        report.streams += streams
        report.aborted += streams and not got.whole and not failure
        report.tokens += sum(map(len, got.tokens))
        report.longest_gap = max(report.longest_gap, got.longest_gap)
        report.tokens_wrong += wrong
        if failure:
            report.failed.append(failure)
        if wrong:
            report.wrong.append(f"{asked}: {wrong} tokens differ: {got.tokens} instead of {asked.tokens}"[:600])


def _read_stream(client: httpx.Client, asked: Asked, got: _Got, abort_after: int | None) -> None:
    """Raises ValueError for a stream that ends with an error, or without an end."""
    seen, last = 0, 0.0
    with client.stream("POST", asked.path, json=asked.body) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {response.read()[:200]!r}")
        for line in response.iter_lines():
            if line == "data: [DONE]":
                got.whole = True
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"the stream ended with {event['error']}")
            now = time.monotonic()
            got.longest_gap = max(got.longest_gap, now - last if seen else 0.0)
            last = now
            seen += got.take(event)
            if abort_after is not None and seen >= abort_after:
                return
    if not got.whole:
        raise ValueError("the stream has no end")


def _wrong_tokens(asked: Asked, got: _Got) -> int:
    """Tokens that are not those of the reference: at their places, missing from a whole answer, or too many."""
    wrong = 0
    for expected, tokens, expected_text, text in zip(asked.tokens, got.tokens, asked.texts, got.texts, strict=True):
        pairs = itertools.zip_longest(expected, tokens) if got.whole else zip(expected, tokens, strict=False)
        differing = sum(one != other for one, other in pairs) + max(0, len(tokens) - len(expected)) * (not got.whole)
        same_text = text == expected_text if got.whole else expected_text.startswith(text)
        wrong += differing or (not same_text)
    return wrong
