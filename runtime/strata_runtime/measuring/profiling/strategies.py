"""Strategies of a stage that several ranks share, timed: real ranks on shallow layers of a model's shapes, through the path that serves, collectives included.

Called by `strata profile --ranks` and by benchmarks. Ranks wait for each other, so that seconds are those of the clock on the wall: measure where nothing
else runs.
"""

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName
from strata_planner.contract.frames import FrameHeader, Segment
from strata_planner.contract.latencies import StrategyPoint
from strata_planner.contract.plan import DeviceRef
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import STRATEGIES, SWITCHED_FORMATS, StrategyName, why_not_switched
from strata_runtime.errors import InputError
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.measuring.profiling.model import Sizes, make_shallow
from strata_runtime.measuring.profiling.stage import PAGE_TOKENS, StageSpec, role_of
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.slot.other_ranks import OtherRanks, check_ranks
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.stage.executor import StageExecutor

log = logging.getLogger(__name__)

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step
LAYERS = 2
PASSES = 6
MOST_SECONDS = 6.0  # of a step: longer ones are left out


class RankedStage:
    """A stage of several ranks on which any strategy can be timed."""

    def __init__(self, model: Path, role: Role) -> None:
        """Starts the other ranks and loads all parts. Raises InputError as a prepare does."""
        check_ranks(role)
        self._role = role
        self.ranks, self.format = role.tensor_parallel, role.format[0]
        self._others = OtherRanks(role, model, verify=True)
        options = LoadOptions(collectives=self._others.collectives)
        self._model: StageModel = load_stage(role, model, lambda *_: None, torch.device("cpu"), options)
        self._others.wait_loaded(lambda: None)
        self._cache: PagedKvCache = cache_of(role, self._model)
        self._entered = self._left = 0.0
        self._model.layers[0].register_forward_pre_hook(self._enter)
        self._model.layers[-1].register_forward_hook(self._leave)

    def seconds(self, strategy: StrategyName, segments: Sequence[Segment], runs: int) -> list[float]:
        """Of a layer, in each of `runs` steps with these segments."""
        role = structs.replace(self._role, strategies=((1, strategy),))
        self._others.begin(role, log.error)
        self._cache.reset()
        executor = StageExecutor(role, self._model, self._cache, self._others)
        tokens = torch.arange(sum(each.length for each in segments)) * 31 % executor.vocabulary
        taken = []
        for step in range(runs):
            known = [structs.replace(each, blocks=()) if step else each for each in segments]
            header = FrameHeader(0, 1, step, "", known, [], role.compute_type, self._model.hidden_size)
            executor.compute(header, tokens)
            taken.append((self._left - self._entered) / self._model.num_layers)
        return taken

    def end(self) -> None:
        """The other ranks end."""
        self._others.end()

    def _enter(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self._left = time.perf_counter()


@contextmanager
def ranked_stage(
    fields: Mapping[str, Any], ranks: int, spec: StageSpec, threads: int, model: Path | None = None
) -> Iterator[RankedStage]:
    """`fields`: of config.json; `spec`: of the shallow stage; `model`: a folder with such a model, made where None. Raises InputError for a model that runs Megatron alone."""
    reason = why_not_switched(str(fields["model_type"]), spec.formats, "cpu")
    if reason:
        raise InputError(f"its ranks run Megatron alone ({reason}): there is nothing to measure; leave --ranks out")
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        where = model or make_shallow(fields, len(spec.formats), Path(folder))
        devices = tuple(DeviceRef("cpu", index, 0) for index in range(ranks))
        role = structs.replace(
            role_of(spec),
            devices=devices,
            tensor_parallel=ranks,
            bits=tuple(BITS_OF_FORMAT[name] for name in spec.formats),
            strategies=((1, "weight-gathered"),),
        )
        stage = RankedStage(where, role)
        try:
            yield stage
        finally:
            stage.end()


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


def switched_format(formats: Sequence[FormatName]) -> FormatName:
    """The first of them whose layers switch. Raises InputError where there is none."""
    found = next((name for name in formats if name in SWITCHED_FORMATS), None)
    if found is None:
        raise InputError(f"--ranks measures layers in {' or '.join(SWITCHED_FORMATS)}: give one of them in --formats")
    return found
