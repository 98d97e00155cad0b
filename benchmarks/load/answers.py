"""Clients that ask for the same few answers again and again while something else goes wrong, each token with the moment it came.

Used by `benchmarks.kills`: the clients are threads of a process of their own, whose clock is that of the process that breaks things.
"""

import json
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx

from benchmarks.attack.target import HOST
from strata_runtime.structured.compiler import is_installed

TEXT = Path("examples/models/strata-tiny/heldout.txt")
LENGTHS = (12, 60, 200, 480)  # characters of prompts
ANSWERS = (40, 90, 150, 220)  # tokens
_PATIENCE_SECONDS = 900.0
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 8}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}  # fmt: skip

Body = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One request."""

    path: str
    body: Body

    def __str__(self) -> str:
        how = "a schema" if "response_format" in self.body else f"temperature {self.body['temperature']}"
        return f"{how}, {self.body['max_tokens']} tokens at most"


@dataclass
class Answer:
    """What came of one request. `times`: of each message with tokens, seconds of the machine's steady clock; `error`: it was lost."""

    kind: int
    asked: float
    tokens: list[str] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""


def kinds(model: str, count: int, seed: int, *, with_schema: bool = True) -> list[Kind]:
    """Long and short, greedy and drawn by a seed, stopped by strings, not streamed, and one by a schema where that can be."""
    draw, text = random.Random(seed), TEXT.read_text()
    made = []
    for number in range(count):
        start = draw.randrange(len(text) - 1000)
        body: Body = {
            "model": model,
            "max_tokens": ANSWERS[number % len(ANSWERS)],
            "temperature": (0, 0.8)[number // 2 % 2],
            "seed": number,
            "stream": number % 8 != 7,
        }
        prompt = text[start : start + LENGTHS[number // 2 % len(LENGTHS)]]
        if number == 1 and with_schema and is_installed():
            form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True}}
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "response_format": form}
            made.append(Kind("/v1/chat/completions", body))
            continue
        body |= {"prompt": prompt, "logprobs": 0, "ignore_eos": True}
        made.append(Kind("/v1/completions", body | ({"stop": ["\n\n\n"]} if number % 8 == 5 else {})))
    return made


def ask(client: httpx.Client, number: int, kind: Kind) -> Answer:
    """One answer, whole or with its error."""
    answer = Answer(number, time.monotonic())
    try:
        if kind.body["stream"]:
            _stream(client, kind, answer)
        else:
            whole = client.post(kind.path, json=kind.body)
            whole.raise_for_status()
            _take(answer, whole.json())
            answer.times.clear()  # when its tokens came nobody knows
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__} {error}"[:300]
    answer.ended = time.monotonic()
    return answer


def _stream(client: httpx.Client, kind: Kind, answer: Answer) -> None:
    """Raises ValueError for a stream that ends with an error, or without an end."""
    with client.stream("POST", kind.path, json=kind.body) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{response.status_code}: {response.read()[:200]!r}")
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: {"):
                _take(answer, json.loads(line[6:]))
    raise ValueError("the stream has no end")


def _take(answer: Answer, event: Body) -> None:
    if "error" in event:
        raise ValueError(f"the stream ended with {event['error']}")
    for choice in event["choices"]:
        said = choice.get("message") or choice.get("delta") or {}
        answer.text += choice.get("text") or said.get("content") or ""
        logprobs = choice.get("logprobs") or {}
        tokens = logprobs.get("tokens") or [token["token"] for token in logprobs.get("content") or ()]
        answer.tokens += tokens
        if tokens:
            answer.times.append(time.monotonic())


def client_of(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://{HOST}:{port}", timeout=_PATIENCE_SECONDS)


def undisturbed(port: int, asked: Sequence[Kind]) -> list[Answer]:
    """Each once: what the answers are when nothing goes wrong. Raises RuntimeError where one fails."""
    with client_of(port) as client, ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(partial(ask, client), range(len(asked)), asked))
    for answer in answers:
        if answer.error:
            raise RuntimeError(f"{asked[answer.kind]}: {answer.error}")
    return answers


class Load:
    """The clients, one for each kind, until `end`."""

    def __init__(self, port: int, asked: Sequence[Kind]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._stop: Event = spawn.Event()
        self._heard, said = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=_run, args=(port, list(asked), self._stop, said))
        self._process.start()
        said.close()
        self._heard.recv()  # every client has its first token

    def end(self) -> list[Answer]:
        """All answers; those under way are read to their ends."""
        self._stop.set()
        answers: list[Answer] = self._heard.recv()
        self._process.join()
        return answers

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def load(port: int, asked: Sequence[Kind]) -> Iterator[Load]:
    clients = Load(port, asked)
    try:
        yield clients
    finally:
        clients.kill()


def _run(port: int, asked: Sequence[Kind], stop: Event, said: Any) -> None:
    answers: list[Answer] = []
    lock = threading.Lock()
    first = threading.Barrier(len(asked) + 1)

    def one(number: int) -> None:
        with client_of(port) as client:
            answer = ask(client, number, asked[number])
            first.wait()
            while True:
                with lock:
                    answers.append(answer)
                if stop.is_set():
                    return
                answer = ask(client, number, asked[number])

    with ThreadPoolExecutor(len(asked)) as threads:
        running = [threads.submit(one, number) for number in range(len(asked))]
        first.wait()
        said.send(None)
        for each in running:
            each.result()
    said.send(answers)
