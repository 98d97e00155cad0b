"""What it costs to be ready for a loss while nothing is lost: throughput with boundary log and shadows, over that without.

`python -m benchmarks.steady [--json FILE] [--quick]`. Two stages of one thread and one core each, the 246-million-parameter model of `benchmarks.pipeline`, full
micro-batches. Both pipelines are there at once, shadows are held before anything is measured. Runs come in pairs, each with the other one first: what counts is
the median of their ratios, since a machine drifts more from minute to minute than both cost. `--quick`: a small model and one short pair, to see
that it runs; its figures say nothing.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import pipeline
from benchmarks.rows import Row, run
from benchmarks.slots import ServedPipeline, await_shadows, served
from strata_planner.answer.shadows import shadow_table
from strata_planner.contract.plan import Plan
from strata_planner.replan.repair import Takeover
from strata_planner.replan.shadows import with_shadows
from strata_planner.search.planning import make_plan
from strata_runtime.model.random_model import make_random_model

STAGES, SEQUENCES, PAIRS, ROOM_BYTES, GOAL = 2, 16, 40, 1 << 30, 0.97
_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def plans(model: Path) -> tuple[Plan, Plan]:
    """Ready for a loss, and not."""
    request = pipeline.question(model, STAGES, pipeline.load(SEQUENCES))
    logging = replace(request, boundary_log_bytes=ROOM_BYTES)
    ready = with_shadows(replace(logging, min_stages=1), make_plan(logging).plan, Takeover(), ROOM_BYTES)
    if not ready.plan.shadows or not ready.plan.boundary_log_pages:
        raise SystemExit(f"nothing is kept, so that there is nothing to measure: {ready.note}")
    return ready.plan, make_plan(request).plan


def measure(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model = (
            make_random_model(path / "small", "llama", dtype=torch.bfloat16, **_SMALL)
            if quick
            else pipeline.make_model(path)
        )
        ready, plain = plans(model)
        Console(width=150).print(shadow_table(ready))
        with served(ready) as one, served(plain) as other:
            await_shadows(ready, one.client.slots)
            pairs = _pairs(_rate(one, quick=quick), _rate(other, quick=quick), 2 if quick else PAIRS)
    ratios = [mine / its for mine, its in pairs]
    low, middle, high = statistics.quantiles(ratios)
    mine, its = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    row = Row(
        name="steady_cost",
        value=mine,
        unit=f"tokens/s; ratio: median of {len(pairs)} pairs",
        peer="without boundary log and shadows",
        peer_value=its,
        ratio=middle,
        goal=GOAL,
    )
    return [
        row,
        Row("steady_cost_lower_quartile", low, "of the ratios"),
        Row("steady_cost_upper_quartile", high, "of the ratios"),
    ]


def _pairs(mine: Callable[[], float], its: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Each with the other one first."""
    pairs = []
    for number in range(count):
        if number % 2:
            second = its()
            pairs.append((mine(), second))
        else:
            pairs.append((mine(), its()))
    return pairs


def _rate(served_plan: ServedPipeline, *, quick: bool) -> Callable[[], float]:
    """After one run to warm it up."""
    answer = 8 if quick else pipeline.ANSWER
    served_plan.measure(SEQUENCES, pipeline.PROMPT, answer)
    return lambda: served_plan.measure(SEQUENCES, pipeline.PROMPT, answer).tokens_per_second


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steady", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, one short run: to see that it runs")
    given, rest = parser.parse_known_args(arguments)
    run("steady", lambda: measure(quick=given.quick), rest)


if __name__ == "__main__":
    main(sys.argv[1:])
