"""What the scheduler takes of a step: milliseconds of a leader's thread to fill one and to take its result in, by streams.

`python -m benchmarks.scheduling [--json FILE]`, seconds. The engine alone, over a pipeline that answers at once with tokens that nobody can guess; no stage
computes. It says what a scheduler in a thread or a process of its own could take off stage 0.
"""

import random
import time

from benchmarks.rows import Row, run
from strata_planner.contract.frames import SampledToken, Sampling, StepResult, Submit
from strata_planner.contract.plan import MicroBatch, Speculation, SpeculationMode
from strata_runtime.scheduler.engine import Engine
from strata_runtime.scheduler.scheduler import Limits

STREAMS = (1, 4, 16, 64)
PROMPT, VOCABULARY, WARM, STEPS, RUNS = 96, 4096, 20, 300, 5
STEP_SECONDS, ROW_SECONDS = 0.005, 0.0004  # what results say that a step took: `auto` reckons with it


def engine_of(streams: int, mode: SpeculationMode, draw: random.Random) -> Engine:
    """With as many requests as streams."""
    batch = MicroBatch(prefill=max(streams, 4), decode=streams, max_step_tokens=512)
    limits = Limits(
        under_way=1,
        micro_batch=batch,
        page_tokens=16,
        page_budget=4000,
        max_model_len=1024,
        speculation=Speculation(mode, 4),
    )
    engine = Engine(limits)
    for number in range(streams):
        prompt = [draw.randrange(VOCABULARY) for _ in range(PROMPT)]
        name = str(number)
        engine.submit(Submit(name, prompt, [], WARM + STEPS + 100, [], Sampling(1.0, seed=number), salt=name))
    return engine


def milliseconds(streams: int, mode: SpeculationMode) -> float:
    """Of a step."""
    draw, taken = random.Random(1), 0.0
    engine = engine_of(streams, mode, draw)
    for number in range(WARM + STEPS):
        started = time.perf_counter()
        step = engine.next_step()
        seconds = time.perf_counter() - started
        assert step is not None
        tokens = [
            SampledToken(segment.sequence, position, draw.randrange(VOCABULARY), 0.0, [])
            for segment in step.segments
            for position in segment.sampled
        ]
        said = STEP_SECONDS + ROW_SECONDS * sum(segment.length for segment in step.segments)
        started = time.perf_counter()
        engine.take(StepResult(0, 1, step.step, tokens, "weights", said))
        seconds += time.perf_counter() - started
        taken += seconds * (number >= WARM)
    return 1000 * taken / STEPS


def measure() -> list[Row]:
    rows = []
    for streams in STREAMS:
        plain, auto = (min(milliseconds(streams, mode) for _ in range(RUNS)) for mode in ("none", "auto"))
        rows.append(Row(f"scheduling_{streams}", plain, "ms a step"))
        rows.append(Row(f"scheduling_auto_{streams}", auto, "ms a step", "none", plain, auto / plain))
    return rows


if __name__ == "__main__":
    run("scheduling", measure)
