"""A stage of several ranks to measure: shallow layers of a model's shapes over real ranks, through the path that serves, sums included.

Used by `strategies` and `shared_layers`. Ranks wait for each other, so that seconds are those of the clock on the wall: measure where nothing else runs.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec import structs

from strata_planner.contract.formats import BITS_OF_FORMAT
from strata_planner.contract.frames import FrameHeader, Segment
from strata_planner.contract.plan import DeviceRef
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import MEGATRON_ONLY, StrategyName
from strata_runtime import huge_pages
from strata_runtime.loading.load import LoadOptions, load_stage
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.measuring.profiling.stage import StageSpec, role_of
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.slot.other_ranks import OtherRanks, check_ranks
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.stage.executor import StageExecutor

log = logging.getLogger(__name__)


class RankedStage:
    """A stage of several ranks on which steps can be timed, by any strategy that its role names."""

    def __init__(self, model: Path, role: Role) -> None:
        """Starts the other ranks and loads all parts. Raises InputError as a prepare does."""
        check_ranks(role)
        self._role = role
        self.ranks, self.format, self.layers = role.tensor_parallel, role.format[0], len(role.format)
        self._others = OtherRanks(role, model, verify=True)
        options = LoadOptions(collectives=self._others.collectives)
        self._model: StageModel = load_stage(role, model, lambda *_: None, torch.device("cpu"), options)
        huge_pages.wait()  # it would be gathered beside what is timed
        self._others.wait_loaded(lambda: None, lambda: None)
        self._cache: PagedKvCache = cache_of(role, self._model)
        self._entered = self._left = 0.0
        self._clocks = (
            self._model.layers[0].register_forward_pre_hook(self._enter),
            self._model.layers[-1].register_forward_hook(self._leave),
        )

    def seconds(
        self, strategy: StrategyName, segments: Sequence[Segment], runs: int, before: Sequence[Segment] = ()
    ) -> list[float]:
        """Of a layer, in each of `runs` steps with these segments. `before`: computed first, each in a step of its own."""
        role = structs.replace(self._role, strategies=((1, strategy),))
        self._others.begin(role, log.error)
        self._cache.reset()
        executor = StageExecutor(role, self._model, self._cache, self._others)
        again = [structs.replace(each, blocks=()) for each in segments]
        steps = [*([each] for each in before), segments, *[again] * (runs - 1)]
        taken = []
        for number, step in enumerate(steps):
            header = FrameHeader(0, 1, number, "", list(step), [], role.compute_type, self._model.hidden_size)
            executor.compute(header, torch.arange(sum(each.length for each in step)) * 31 % executor.vocabulary)
            taken.append((self._left - self._entered) / self._model.num_layers)
        return taken[len(before) :]

    def end(self) -> None:
        """The other ranks end, and nothing of the model refers to this any more."""
        for clock in self._clocks:
            clock.remove()
        self._others.end()

    def _enter(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self._left = time.perf_counter()


@contextmanager
def ranked_stage(
    model: Path,
    ranks: int,
    spec: StageSpec,
    threads: int,
    strategies: tuple[tuple[int, StrategyName], ...] = MEGATRON_ONLY,
) -> Iterator[RankedStage]:
    """`model`: a folder with layers for all of `spec`; `threads`: of each rank. Raises InputError for a model that ranks cannot share."""
    torch.set_num_threads(threads)
    role = structs.replace(
        role_of(spec),
        devices=tuple(DeviceRef("cpu", index, 0) for index in range(ranks)),
        tensor_parallel=ranks,
        bits=tuple(BITS_OF_FORMAT[name] for name in spec.formats),
        strategies=strategies,
    )
    stage = RankedStage(model, role)
    try:
        yield stage
    finally:
        stage.end()
