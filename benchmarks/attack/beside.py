"""The normal stream beside an attack: one client that asks for the same greedy answer again and again and watches the clock.

A thread of its own: what the attacker computes, in another process, does not count. One connection is kept for all answers, as a
client's pool keeps it, and another is made when it ends.
"""

import http.client
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from benchmarks.attack.target import HOST

PROMPT = "def read(self, size=-1):"
TOKENS = 400
_PATIENCE_SECONDS = 30.0


class Beside:
    """Runs while it is entered. `during` names what is attacked now: gaps and failures are put down to it."""

    def __init__(self, port: int, model: str) -> None:
        self.during = "nothing"
        self.longest_gaps: dict[str, float] = defaultdict(float)
        self.longest_waits: dict[str, float] = defaultdict(float)  # for the first token
        self.failures: list[str] = []
        self.answers = 0
        self._port = port
        self._body = json.dumps(
            {
                "model": model,
                "prompt": PROMPT,
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        self.reference = ""
        self._last = 0.0
        self._tokens = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream beside", daemon=True)

    def __enter__(self) -> Self:
        self.reference = "".join(self._answer(self._connection()))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_PATIENCE_SECONDS + 5)

    def settle(self, seconds: float) -> None:
        """Returns when a token has come that was not there yet: a pause that began before is then known whole."""
        seen, deadline = self._tokens, time.monotonic() + seconds
        while self._tokens < seen + 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    def again(self) -> str:
        """What is wrong with the same answer asked for now, on a connection of its own; empty if nothing."""
        try:
            text = "".join(self._answer(self._connection()))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"no answer: {type(error).__name__} {error}"
        return "" if text == self.reference else f"another text than before: {text[:80]!r}"

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self._port, timeout=_PATIENCE_SECONDS)

    def _run(self) -> None:
        connection = self._connection()
        while not self._over.is_set():
            during = self.during
            try:
                text = "".join(self._answer(connection))
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not self._over.is_set():
                    self.longest_gaps[during] = max(self.longest_gaps[during], time.monotonic() - self._last)
                    self.failures.append(f"{during}: {type(error).__name__} {error}")
                connection.close()
                connection = self._connection()
                time.sleep(0.1)
                continue
            if self._over.is_set():
                break
            self.answers += 1
            if text != self.reference:
                self.failures.append(f"{during}: {text[:60]!r}... is not the text of a quiet deployment")
        connection.close()

    def _answer(self, connection: http.client.HTTPConnection) -> Iterator[str]:
        """Its pieces of text as they come. Raises ValueError for an answer that is none."""
        self._last = asked = last = time.monotonic()
        connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{response.status}: {response.read()[:300]!r}")
        tokens = 0
        while (line := response.readline()) and not self._over.is_set():
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            kind, since = (self.longest_gaps, last) if tokens else (self.longest_waits, asked)
            during = self.during
            kind[during] = max(kind[during], now - since)
            self._last = last = now
            tokens += 1
            self._tokens += 1
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"the stream ended with {event['error']}")
            yield from (choice["text"] for choice in event["choices"])
