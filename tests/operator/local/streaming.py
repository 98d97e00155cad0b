"""A completion as its client reads it, piece by piece."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any


def stream(port: int, prompt: list[int], model: str, **more: Any) -> Iterator[str]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["text"]
