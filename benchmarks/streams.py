"""Five hundred streams for a minute over two stages: errors, memory, and how even they flow.

`python -m benchmarks.streams [--json FILE]`. strata-tiny under `strata up`, each stage with a core of its own, which the clients share. Each client
asks anew as soon as its answer has ended. `gap_p99_over_median`: seconds between two pieces of a stream.
"""

import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.deployment import NAME, Wishes, deployed
from benchmarks.load import streams
from benchmarks.load.memory import Memory
from benchmarks.rows import Row, run

MODEL = Path("examples/models/strata-tiny").resolve()
STREAMS, SECONDS, WARM_UP_SECONDS = 500, 60.0, 30.0
ANSWER = 32
MEBIBYTE = 1 << 20


def measure() -> list[Row]:
    wishes = Wishes(
        MODEL,
        max_model_len=512,
        prompt_tokens=80,
        output_tokens=ANSWER,
        concurrency=STREAMS,
        device_bytes=2_000_000_000,
    )
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder), wishes) as deployment:
        load = (deployment.port, NAME, STREAMS)
        with ProcessPoolExecutor(1, get_context("spawn")) as clients:
            clients.submit(streams.run, *load, WARM_UP_SECONDS, ANSWER).result()  # pools and kernels
            memory = Memory(deployment)
            memory.sample()
            running = clients.submit(streams.run, *load, SECONDS, ANSWER)
            while not running.done():
                memory.sample()
                time.sleep(0.5)
            seen = running.result()
    return rows(seen, memory)


def rows(seen: streams.Seen, memory: Memory) -> list[Row]:
    for reason in seen.failed[:5]:
        print(reason)
    # The highest of the second half over that of the first: what a full load takes is there from its beginning on.
    grown = 0.0
    for samples in memory.samples.values():
        sizes = [size for _, size in samples]
        half = len(sizes) // 2
        grown += max(0, max(sizes[half:]) - max(sizes[:half]))
    gaps = sorted(seen.gaps)
    median, late = statistics.median(gaps), gaps[int(0.99 * len(gaps))]
    firsts = statistics.median(seen.firsts)
    return [
        Row("streams_500_errors", len(seen.failed), f"of {seen.ended} ended", goal=0, lower_is_better=True),
        Row("streams_500_growth", grown / MEBIBYTE, "MiB, all processes", goal=50, lower_is_better=True),
        Row("streams_500_gap", late, "s, p99", "median", median, late / median, goal=5, lower_is_better=True),
        Row("streams_500_rate", seen.tokens / SECONDS, f"tokens/s; median first token {firsts:.2f} s"),
    ]


if __name__ == "__main__":
    run("streams", measure)
