"""Ten minutes of mixed load while a slot is killed every minute: no token is lost or doubled, and nothing fills up.

`python -m benchmarks.soak [--minutes N] [--seed N] [--json FILE]`. Every text is compared with what the same request got beforehand
in a quiet deployment. Clients are threads of a process of their own; memory and kills are this one's.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.attack.http_send import gauge
from benchmarks.deployment import NAME, Deployment, Wishes, deployed
from benchmarks.load import clients
from benchmarks.load.clients import Report
from benchmarks.load.memory import Memory
from benchmarks.rows import Row, run

MODEL = Path("examples/models/strata-tiny").resolve()
WARM_UP_SECONDS = 120.0  # of the whole: the trend counts from here on
KILL_SECONDS = 60.0
EMPTY_SECONDS = 20.0  # until KV must be empty after the last answer
MOST_GROWTH_BYTES = 1_000_000  # a minute


def measure(minutes: float, seed: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wishes = Wishes(MODEL, max_model_len=512, prompt_tokens=100, output_tokens=120, concurrency=8)
        deployment = stack.enter_context(deployed(folder, wishes))
        load = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        print("references: every request once, alone", flush=True)
        asked = load.submit(clients.references, deployment.port, NAME, seed).result()
        print(f"{len(asked)} kinds of request; {minutes:g} minutes of load", flush=True)
        running = load.submit(clients.run, deployment.port, asked, minutes * 60, seed)
        memory = Memory(deployment)
        kills = _watch(deployment, memory, running, minutes * 60)
        report = running.result()
        left = _kv_left(deployment)
    return rows(report, memory, kills, left)


def _watch(deployment: Deployment, memory: Memory, running: "Future[Report]", seconds: float) -> int:
    """Samples memory and kills a slot each minute, the first and the last stage in turn, until the load is over."""
    kills = 0
    started = time.monotonic()
    while not running.done():
        memory.sample()
        due = (kills + 1) * KILL_SECONDS
        if time.monotonic() - started > due and due < seconds - KILL_SECONDS / 2:  # the last one can still be recovered
            deployment.kill_slot(-(kills % 2))
            kills += 1
            print(f"{due / 60:g} min: killed the slot of the {'last' if kills % 2 == 0 else 'first'} stage", flush=True)
        time.sleep(1.0)
    return kills


def _kv_left(deployment: Deployment) -> float:
    """The share of KV in use once nothing runs; the smallest that was seen."""
    least = 1.0
    deadline = time.monotonic() + EMPTY_SECONDS
    while least > 0 and time.monotonic() < deadline:
        least = min(least, gauge(deployment.port, "vllm:kv_cache_usage_perc"))
        time.sleep(0.25)
    return least


def rows(report: Report, memory: Memory, kills: int, kv_left: float) -> list[Row]:
    for line in (*report.wrong, *report.failed):
        print(f"    ! {line}")
    trends = memory.trends(WARM_UP_SECONDS)
    for name, trend in sorted(trends.items()):
        print(f"memory of {name}: {trend / 1e6:+.2f} MB a minute")
    worst, slope = max(trends.items(), key=lambda item: item[1], default=("too short to tell", None))
    return [
        _limit("tokens_lost_or_doubled", report.tokens_wrong, f"tokens of {report.tokens}", 0),
        _limit("requests_failed", len(report.failed), f"of {report.requests} requests", 0),
        _limit("kv_left", kv_left, "share of KV in use at the end", 0),
        _limit("memory_bytes_per_minute", slope, f"bytes, {worst}", MOST_GROWTH_BYTES),
        Row("streams_aborted", report.aborted, f"of {report.streams} streams"),
        Row("slots_killed", kills, "kills"),
        Row("longest_gap_seconds", report.longest_gap, "s between two events of a stream, kills included"),
        Row("tokens_per_second", report.tokens / report.seconds, "tokens/s, as clients saw them"),
    ]


def _limit(name: str, value: float | None, unit: str, goal: float) -> Row:
    return Row(name, value, unit, goal=goal, lower_is_better=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen, rest = parser.parse_known_args(arguments)
    run("soak", lambda: measure(chosen.minutes, chosen.seed), rest)


if __name__ == "__main__":
    main()
