"""Strategies of a stage that several ranks share, timed: real ranks on shallow layers of a model's shapes, through the path that serves, collectives included.

Called by `strata profile --ranks` and by benchmarks. Ranks wait for each other, so that seconds are those of the clock on the wall: measure where nothing
else runs.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strata_planner.contract.frames import Segment
from strata_planner.contract.latencies import StrategyPoint
from strata_planner.contract.strategies import STRATEGIES, StrategyName, why_not_switched
from strata_runtime.errors import InputError
from strata_runtime.measuring.profiling.model import Sizes, make_shallow
from strata_runtime.measuring.profiling.ranked import RankedStage, ranked_stage
from strata_runtime.measuring.profiling.stage import PAGE_TOKENS, StageSpec

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step
LAYERS = 2
PASSES = 6
MOST_SECONDS = 6.0  # of a step: longer ones are left out


@contextmanager
def switching_stage(fields: Mapping[str, Any], ranks: int, spec: StageSpec, threads: int) -> Iterator[RankedStage]:
    """`fields`: of config.json; `spec`: of the shallow stage. Raises InputError for a model that runs Megatron alone."""
    reason = why_not_switched(str(fields["model_type"]), spec.formats, "cpu")
    if reason:
        raise InputError(f"its ranks run Megatron alone ({reason}): there is no other strategy to measure")
    with tempfile.TemporaryDirectory() as folder:
        model = make_shallow(fields, len(spec.formats), Path(folder))
        with ranked_stage(model, ranks, spec, threads, ((1, "weight-gathered"),)) as stage:
            yield stage


def prompt(tokens: int) -> list[Segment]:
    """A step of one prompt."""
    return [Segment(0, 0, tokens, 0, tuple(range(-(-tokens // PAGE_TOKENS))))]


def measure_strategies(
    stage: RankedStage,
    lengths: Sequence[int],
    progress: Callable[[int, int, str], None],
    *,
    passes: int = PASSES,
    strategies: Sequence[StrategyName] = STRATEGIES,
) -> list[StrategyPoint]:
    """What the quicker steps of each strategy take at each length, strategies in turn, so that a busy moment does not meet one alone."""
    points: list[StrategyPoint] = []
    for place, tokens in enumerate(lengths):
        taken: dict[StrategyName, list[float]] = {each: [] for each in strategies}
        for number in range(passes):
            for each in strategies:
                runs = stage.seconds(each, prompt(tokens), 1 + _few(taken[each]))
                taken[each] += runs if number else runs[1:]
        points += [StrategyPoint(stage.ranks, stage.format, each, tokens, quick(taken[each])) for each in strategies]
        progress(place + 1, len(lengths), f"strategies of {tokens} tokens")
        if max(point.layer_seconds for point in points) * LAYERS * 2 > MOST_SECONDS:
            break
    return points


def quick(taken: Sequence[float]) -> float:
    """The mean of the quicker third: whoever interrupts one rank holds up all, and never speeds one up."""
    return statistics.fmean(sorted(taken)[: -(-len(taken) // 3)])


def _few(taken: Sequence[float]) -> int:
    """Steps beside the first one: several of short ones."""
    return int(min(12, 0.1 / min(taken))) if taken else 1


def lengths_of(fields: Mapping[str, Any], *, quick: bool) -> tuple[int, ...]:
    """Those of LENGTHS that the model has positions for."""
    most = min(512 if quick else LENGTHS[-1], Sizes.of(fields).positions or LENGTHS[-1])
    return tuple(each for each in LENGTHS if each <= most) or (most,)
