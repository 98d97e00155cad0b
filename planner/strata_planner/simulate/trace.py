"""Traces: which requests arrive when, how long their prompts and answers are. Read or drawn here, run by `simulation`.

Files have the format of the Azure LLM inference trace 2023 (Azure public dataset, CC-BY-4.0; Splitwise, ISCA 2024):
TIMESTAMP,ContextTokens,GeneratedTokens.
"""

import csv
import math
import random
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from strata_planner.errors import WorkloadError

_LENGTHS = 4096  # that a distribution is drawn as, and the seed of them
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Request(NamedTuple):
    """`output_tokens` are generated; `max_tokens` are what the client allows and the leader reserves (0: the same)."""

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0

    @property
    def longest(self) -> int:
        """Positions that the leader reserves pages for."""
        return self.prompt_tokens + max(self.max_tokens, self.output_tokens)


def poisson(
    rate: float, count: int, prompt_tokens: int | Sequence[int], output_tokens: int | Sequence[int], seed: int
) -> tuple[Request, ...]:
    """`count` requests, `rate` a second on average; lengths are drawn evenly from what is given. Raises WorkloadError.

    The same seed draws the same lengths and, scaled by the rate, the same times.
    """
    if not 0 < rate < math.inf or count < 1:
        raise WorkloadError(f"rate {rate} and {count} requests: a rate above 0 and at least 1 request are needed")
    draw = random.Random(seed)
    prompts, outputs = _choices("prompt", prompt_tokens), _choices("output", output_tokens)
    now, requests = 0.0, []
    for _ in range(count):
        now += draw.expovariate(1.0)
        requests.append(Request(now / rate, draw.choice(prompts), draw.choice(outputs)))
    return tuple(requests)


def spread(mean: int, deviation: float) -> Sequence[int]:
    """Lengths to draw from: a gamma distribution's, which are never below 1, many short ones and few long ones; from half to one and a half of the mean
    where nobody says how they differ (`deviation` 0).
    """
    if not deviation:
        return range(-(-mean // 2), mean * 3 // 2 + 1)
    shape, draw = (mean / deviation) ** 2, random.Random(_LENGTHS)
    drawn = [draw.gammavariate(shape, mean / shape) for _ in range(_LENGTHS)]
    scale = mean * _LENGTHS / max(sum(drawn), 1e-9)
    return [max(1, round(each * scale)) for each in drawn]


def within(request: Request, most_tokens: int) -> Request:
    """The request, or the most of it that is no longer than `most_tokens` together."""
    output = min(request.output_tokens, max(1, most_tokens - 1))
    prompt = min(request.prompt_tokens, max(1, most_tokens - output))
    return request._replace(prompt_tokens=prompt, output_tokens=output)


def of_clients(
    clients: int,
    count: int,
    prompt_tokens: int | Sequence[int],
    output_tokens: int | Sequence[int],
    seed: int,
    most_tokens: int,
) -> tuple[Request, ...]:
    """For a closed loop: `count` requests of lengths that are drawn evenly from what is given, or from half to one and a half of it, none longer
    than `most_tokens` together. The first `clients` are found amid their answers, so that they do not all end at once. Raises WorkloadError.
    """
    if clients < 1 or count < 1:
        raise WorkloadError(f"{clients} clients and {count} requests: at least 1 of each is needed")
    draw = random.Random(seed)
    lengths = (("prompt", prompt_tokens), ("output", output_tokens))
    choices = [_choices(what, spread(given, 0.0) if isinstance(given, int) else given) for what, given in lengths]
    found = []
    for number in range(clients + count):
        whole = within(Request(0.0, *(draw.choice(each) for each in choices)), most_tokens)
        amid = number < clients
        found.append(whole._replace(output_tokens=draw.randint(1, whole.output_tokens)) if amid else whole)
    return tuple(found)


def at_once(requests: Iterable[Request]) -> tuple[Request, ...]:
    """The same requests, all at time 0: what the system can do, whatever comes."""
    return tuple(request._replace(arrival_seconds=0.0) for request in requests)


def scaled(requests: Sequence[Request], rate: float) -> tuple[Request, ...]:
    """The same requests with the same bursts at `rate` a second on average. Raises WorkloadError."""
    if not 0 < rate < math.inf:
        raise WorkloadError(f"rate {rate}: a rate above 0 is needed")
    last = max((request.arrival_seconds for request in requests), default=0.0)
    factor = len(requests) / rate / last if last else 0.0
    return tuple(request._replace(arrival_seconds=request.arrival_seconds * factor) for request in requests)


def azure(path: Path | str, limit: int | None = None) -> tuple[Request, ...]:
    """The requests of a csv trace, the first at time 0; at most `limit`. Raises WorkloadError with the line."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise WorkloadError(
                    f"trace {path}: columns {', '.join(missing)} are missing; {','.join(_COLUMNS)} are needed"
                )
            rows = [_row(path, line, row) for line, row in enumerate(islice(reader, limit), start=2)]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"trace {path}: {error}; name a csv file that can be read") from error
    if not rows:
        raise WorkloadError(f"trace {path}: it holds no requests")
    first = min(at for at, _, _ in rows)
    return tuple(Request((at - first).total_seconds(), prompt, output) for at, prompt, output in sorted(rows))


def _row(path: Path | str, line: int, row: dict[str, str]) -> tuple[datetime, int, int]:
    try:
        at, prompt, output = (row[name] for name in _COLUMNS)
        lengths = int(prompt), int(output)
        if min(lengths) < 1:
            raise WorkloadError(f"trace {path} line {line}: {prompt} and {output} tokens; at least 1 of each is needed")
        return datetime.fromisoformat(at), *lengths
    except (TypeError, ValueError) as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"trace {path} line {line}: {error}; {','.join(_COLUMNS)} are needed") from error


def _choices(what: str, given: int | Sequence[int]) -> Sequence[int]:
    chosen = [given] if isinstance(given, int) else given
    if not chosen or min(chosen) < 1 or not all(math.isfinite(each) for each in chosen):
        raise WorkloadError(f"{what} tokens {given}: at least 1 is needed")
    return chosen
