"""The drafter: what a draft round makes of a small model's logits, in the thread of stage 0's worker, between steps. Loaded by the
slot's prepare, called by the leader's engine.

Its pool has the numbers of the replica's blocks, and every task brings its sequence's table: nothing is remembered from round to round but what lies
in the pool. Draws follow the rule of (seed, position), so that drawn text agrees as often as it can; what rules and grammars say is left to the
verification.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from strata_planner.contract.frames import Segment
from strata_runtime.allocator import FirstTimes
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import Batch, PagedKvCache
from strata_runtime.scheduler.draft_round import Drafted, DraftRound, DraftTask
from strata_runtime.stage.sampling import choose


class Guesser(ABC):
    """What drafts: logits of what comes behind tokens, keys and values of which it stores. `first`: the first position that it computes."""

    first = 0
    layers_begun = 0  # as of the model that verifies, where it has layers enough to take long

    def begin(self) -> None:  # noqa: B027, most remember nothing
        """Of an epoch: no block holds anything."""

    def expect(self, places: torch.Tensor) -> None:  # noqa: B027, most read no states
        """A step of the model that verifies has begun: where in the replica's pool its tokens lie, [tokens]."""

    def take(self, states: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """Of the oldest step that is expected: hidden states [tokens, hidden] that the layers in `Speculation.fused` handed on."""

    @abstractmethod
    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """tokens: [tokens] int64, of the texts themselves. [rows, its vocabulary] float32 of `batch.sample_rows`."""

    @abstractmethod
    def further(self, tokens: torch.Tensor, batch: Batch, rows: Sequence[int]) -> torch.Tensor:
        """The same of tokens that were drafted, one behind each of these rows of the logits before."""

    @abstractmethod
    def tokens(self, chosen: list[int]) -> list[int]:
        """Of the model that verifies, for columns of the logits."""

    @abstractmethod
    def kernel_sizes(self, batch: Batch) -> set[tuple[str, int, int]]:
        """All that the libraries make kernels for in a step of this batch on a processor."""


class SmallModel(Guesser):
    """A whole model of the same tokens. `vocabulary`: rows of the embedding of the model that verifies."""

    def __init__(self, model: StageModel, vocabulary: int) -> None:
        self.model = model
        self._vocabulary = vocabulary

    @property
    def layers_begun(self) -> int:  # type: ignore[override]
        return self.model.layers_begun

    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Tokens that it does not know are taken for its last: a guess is lost by it."""
        inputs = tokens.clamp(max=self.model.vocab_size - 1)
        return self.model.forward(inputs, batch)[:, : self._vocabulary]

    def further(self, tokens: torch.Tensor, batch: Batch, rows: Sequence[int]) -> torch.Tensor:  # noqa: ARG002, it reads its own text
        return self.logits(tokens, batch)

    def tokens(self, chosen: list[int]) -> list[int]:
        return chosen

    def kernel_sizes(self, batch: Batch) -> set[tuple[str, int, int]]:
        return self.model.kernel_sizes(batch)


class Drafter:
    """A guesser with its pool. `positions`: that it has. `keeps_drafts`: what it stored of drafts that were right is what it would store of the text."""

    def __init__(self, guesser: Guesser, cache: PagedKvCache, positions: int, *, keeps_drafts: bool = True) -> None:
        self.positions = positions
        self.keeps_drafts = keeps_drafts
        self.guesser = guesser
        self.cache = cache
        self._first_times = FirstTimes()

    def begin(self) -> None:
        """Of an epoch: no block holds anything."""
        self.guesser.begin()

    def draft(self, tasks: DraftRound) -> Drafted:
        """Up to `count` tokens of each task."""
        started = time.monotonic()
        self.cache.reset()
        drafted: list[list[int]] = [[] for _ in tasks]
        whole = [task.from_position(self.guesser.first) for task in tasks]
        going = [place for place, task in enumerate(whole) if task.count and task.tokens]
        inputs = [token for task in whole for token in task.tokens]
        logits = self._logits([_segment(task) for task in whole if task.tokens], inputs, None)
        while going:
            drawn = self._drawn(logits, [tasks[place] for place in going], [len(drafted[place]) for place in going])
            for place, token in zip(going, drawn, strict=True):
                drafted[place].append(token)
            rows = [row for row, place in enumerate(going) if len(drafted[place]) < tasks[place].count]
            going = [going[row] for row in rows]
            inputs = [drafted[place][-1] for place in going]
            logits = self._logits([_next(tasks[place], len(drafted[place])) for place in going], inputs, rows)
        return Drafted(drafted, time.monotonic() - started)

    def _logits(self, segments: list[Segment], tokens: list[int], rows: list[int] | None) -> torch.Tensor:
        """Of the rows that are sampled. `rows`: those that these tokens were drawn from; None: they are of the texts."""
        if not segments:
            return torch.empty(0, 0)
        batch = self.cache.plan(segments)
        inputs = torch.tensor(tokens, dtype=torch.int64, device=batch.positions.device)
        with self._first_times.step(self.guesser.kernel_sizes(batch)), torch.inference_mode():
            if rows is None:
                return self.guesser.logits(inputs, batch)
            return self.guesser.further(inputs, batch, rows)

    def _drawn(self, logits: torch.Tensor, tasks: Sequence[DraftTask], drafted: Sequence[int]) -> list[int]:
        """Behind the last token of each."""
        positions = [task.end - 1 + more for task, more in zip(tasks, drafted, strict=True)]
        return self.guesser.tokens(choose(logits, [task.sampling for task in tasks], positions))


def _segment(task: DraftTask) -> Segment:
    return Segment(task.sequence, task.start, len(task.tokens), int(task.count > 0), task.blocks)


def _next(task: DraftTask, drafted: int) -> Segment:
    return Segment(task.sequence, task.end - 1 + drafted, 1, 1)
