"""A slot is killed in mid-stream under `strata up`: seconds to the client's next token, and whether the text is the same.

`python -m benchmarks.recovery [--json FILE]`. The killed slot alternates between the leader and the last stage.
In fp32 every text must be that of an undisturbed run; in bf16 the share of equal tokens is reported, because a replay by
prefill rounds differently from decode.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.deployment import NAME, Deployment, Wishes, deployed
from benchmarks.rows import Row, run

MODEL = Path("examples/models/strata-tiny").resolve()
PROMPT = "def read(self, size=-1):"
TOKENS, KILL_AFTER = 160, 40
KILLS = 4
_PATIENCE_SECONDS = 60.0
_QUIET_SECONDS = 5.5  # between kills: a slot that dies again within 10 s of its start is started later on purpose


@dataclass(frozen=True)
class Stream:
    """One answer: its token strings and when each arrived (seconds of a steady clock)."""

    tokens: list[str]
    times: list[float]


def stream(port: int) -> Iterator[str]:
    """The tokens of one answer as they come."""
    body = {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "logprobs": 0,
    }
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=_PATIENCE_SECONDS) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield from _tokens(json.loads(line[6:]))


def _tokens(chunk: dict[str, list[dict[str, dict[str, list[str]] | None]]]) -> list[str]:
    logprobs = chunk["choices"][0].get("logprobs") if chunk["choices"] else None
    return logprobs["tokens"] if logprobs else []


def record(deployment: Deployment, kill: int | None = None) -> Stream:
    """One answer; slot number `kill` is killed after some tokens."""
    tokens: list[str] = []
    times: list[float] = []
    for token in stream(deployment.port):
        tokens.append(token)
        times.append(time.monotonic())
        if len(tokens) == KILL_AFTER and kill is not None:
            deployment.kill_slot(kill)
    return Stream(tokens, times)


def measure_kills(compute_type: str, kills: int) -> tuple[list[float], list[float]]:
    """Per kill: the longest pause of the stream in seconds, and the share of tokens equal to an undisturbed run's."""
    wishes = Wishes(MODEL, output_tokens=TOKENS, compute_type=compute_type)
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder), wishes) as deployment:
        undisturbed = record(deployment)
        streams = []
        for number in range(kills):
            time.sleep(_QUIET_SECONDS)
            streams.append(record(deployment, kill=-(number % 2)))
    pauses = [max(later - earlier for earlier, later in zip(s.times, s.times[1:], strict=False)) for s in streams]
    shares = [_equal_share(undisturbed.tokens, stream.tokens) for stream in streams]
    return pauses, shares


def _equal_share(expected: list[str], got: list[str]) -> float:
    equal = sum(one == other for one, other in zip(expected, got, strict=False))
    return equal / max(len(expected), len(got))


def measure(kills: int = KILLS) -> list[Row]:
    pauses, exact = measure_kills("float32", kills)
    _, rounded = measure_kills("bfloat16", kills)
    print(f"pauses of the stream in seconds (leader, last stage, ...): {', '.join(f'{pause:.2f}' for pause in pauses)}")
    return [
        Row(name="recovery_seconds", value=statistics.median(pauses), unit=f"s, median of {kills} kills"),
        Row(
            name="recovery_equal_fp32",
            value=statistics.mean(exact),
            unit="share of equal tokens",
            goal=1.0,
            ratio=statistics.mean(exact),
        ),
        Row(name="recovery_equal_bf16", value=statistics.mean(rounded), unit="share of equal tokens"),
    ]


if __name__ == "__main__":
    run("recovery", measure)
