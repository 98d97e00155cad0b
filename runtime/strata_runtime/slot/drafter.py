"""The drafter: a small model of the same tokens that runs whole beside stage 0, in its worker's thread, between steps. Loaded by the
slot's prepare, called by the leader's engine.

Its pool has the numbers of the replica's blocks, and every task brings its sequence's table: nothing is remembered from round to round but what lies
in the pool. Draws follow the rule of (seed, position), so that drawn text agrees as often as it can; what rules and grammars say is left to the
verification.
"""

import time
from collections.abc import Sequence

import torch

from strata_planner.contract.frames import Segment
from strata_runtime.allocator import FirstTimes
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.scheduler.draft_round import Drafted, DraftRound, DraftTask
from strata_runtime.stage.sampling import choose


class Drafter:
    """A whole model with its pool. `positions`: that it has. `vocabulary`: rows of the embedding of the model that verifies."""

    def __init__(self, model: StageModel, cache: PagedKvCache, positions: int, vocabulary: int) -> None:
        self.positions = positions
        self._vocabulary = vocabulary
        self._model = model
        self._cache = cache
        self._first_times = FirstTimes()

    def draft(self, tasks: DraftRound) -> Drafted:
        """Up to `count` tokens of each task."""
        started = time.monotonic()
        self._cache.reset()
        segments = [
            Segment(task.sequence, task.start, len(task.tokens), int(task.count > 0), task.blocks) for task in tasks
        ]
        drafted: list[list[int]] = [[] for _ in tasks]
        inputs = [token for task in tasks for token in task.tokens]
        going = [place for place, task in enumerate(tasks) if task.count]
        while segments:
            logits = self._logits(segments, inputs)
            drawn = self._drawn(logits, [tasks[place] for place in going], [len(drafted[place]) for place in going])
            for place, token in zip(going, drawn, strict=True):
                drafted[place].append(token)
            going = [place for place in going if len(drafted[place]) < tasks[place].count]
            inputs = [drafted[place][-1] for place in going]
            segments = [_next(tasks[place], len(drafted[place])) for place in going]
        return Drafted(drafted, time.monotonic() - started)

    def _logits(self, segments: list[Segment], tokens: list[int]) -> torch.Tensor:
        """[rows, vocab] of the rows that are sampled. Tokens that it does not know are taken for its last: a guess is lost by it."""
        batch = self._cache.plan(segments)
        inputs = torch.tensor(tokens, dtype=torch.int64, device=self._model.device)
        with self._first_times.step(self._model.kernel_sizes(batch)):
            return self._model.forward(inputs.clamp_(max=self._model.vocab_size - 1), batch)

    def _drawn(self, logits: torch.Tensor, tasks: Sequence[DraftTask], drafted: Sequence[int]) -> list[int]:
        """Behind the last token of each."""
        if not tasks:
            return []
        positions = [task.end - 1 + more for task, more in zip(tasks, drafted, strict=True)]
        return choose(logits[:, : self._vocabulary], [task.sampling for task in tasks], positions)


def _next(task: DraftTask, drafted: int) -> Segment:
    return Segment(task.sequence, task.end - 1 + drafted, 1, 1)
