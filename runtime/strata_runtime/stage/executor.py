"""The stage executor: runs one frame on one stage. Called by the stage's worker; knows no sockets.

It holds the laws of a frame: steps without gaps, KV operations before the segments, hidden states packed [tokens, hidden]; and that of a change of
precision: never within a step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from msgspec import structs

from strata_planner.contract.frames import (
    FrameHeader,
    Free,
    KvOperation,
    Open,
    StepResult,
    Survey,
)
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import strategy_for
from strata_runtime.allocator import FirstTimes
from strata_runtime.errors import StepError
from strata_runtime.loading.precision_switch import Change, Growth, role_after
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import Batch, PagedKvCache
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.stage.boundary import StepBoundary
from strata_runtime.stage.contents import Content
from strata_runtime.stage.holdings import Holdings
from strata_runtime.stage.inheritance import Inheritance, Refill, weights_by_layer
from strata_runtime.stage.sampler import Sampler


@dataclass(slots=True)
class Work:
    """What a stage has done since its commit; written by its worker, read by the slot."""

    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    busy_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    frames_dropped: int = 0
    sent_bytes: int = 0  # of hidden states, to the next stage
    shared_bytes: int = 0  # of what came in, to the other ranks of this stage
    refilled: int = 0  # tokens x layers
    waits: bool = False  # for something to do
    turns: int = 0  # so often there was something


class Passed(NamedTuple):
    """What a stage hands on: hidden states [tokens, hidden] behind their header. `states`: likewise of the watched layers so far, each its own.

    `places`: [tokens], where the step's tokens lie in this stage's pool.
    """

    header: FrameHeader
    hidden: torch.Tensor
    states: Sequence[torch.Tensor] = ()
    places: torch.Tensor | None = None


class Answered(NamedTuple):
    """What the last stage hands back, with the states of all watched layers. `places`: as of `Passed`."""

    result: StepResult
    states: Sequence[torch.Tensor] = ()
    places: torch.Tensor | None = None


class _Computed(NamedTuple):
    """Of one step: what comes out of the stage's own layers."""

    outputs: torch.Tensor
    states: list[torch.Tensor]
    places: torch.Tensor


class OtherRanks(Protocol):
    """What the first rank of a stage needs of the others."""

    def step(self, header: FrameHeader, inputs: torch.Tensor) -> None:
        """They compute it too. Raises StepError where they cannot."""

    def finish(self) -> None:
        """What all ranks have added up of a step is there. Raises StepError where one of them is lost."""

    def swap_bits(self) -> None:
        """The layer that they have read for a switch has its new bits from the next step on. Raises StepError where they cannot."""

    def check_bits(self, bits: dict[int, int]) -> None:
        """Raises InputError with the reason of one of them for which layers cannot have these bits."""

    def reading(self, layer: int, bits: int) -> AbstractContextManager[Callable[[], Growth]]:
        """Within it they read what a switch of a layer needs; what it gives waits for them and tells the bytes of all of them."""


class StageExecutor:
    """One role's layers, its KV pages and, on the last stage, the sampler. `role` tells the bits that its layers have now."""

    def __init__(
        self,
        role: Role,
        model: StageModel,
        cache: PagedKvCache,
        others: OtherRanks | None = None,
        inherited: Inheritance | None = None,
    ) -> None:
        """`others`: the ranks that share the stage; they are given every step. `inherited`: what the pages of its cache hold already."""
        self.role = role
        self.others = others
        self.work = Work()
        self.vocabulary = model.vocab_size  # rows of the whole model's embedding
        self.hidden = model.hidden_size
        self.model = model
        self.boundary = StepBoundary()
        self._first_times = FirstTimes()
        self._cache = cache
        self._sampler = Sampler(role.model_uri, model.vocab_size)
        self._next_step = 0
        log_pages = None if cache.log is None else cache.log.pages
        self._holdings = Holdings(role, weights_by_layer(role, model.held), inherited, log_pages)

    def run(
        self, header: FrameHeader, inputs: torch.Tensor, received: Sequence[torch.Tensor] = ()
    ) -> Passed | Answered | None:
        """One step. inputs: token ids [tokens] on the first stage, hidden states [tokens, hidden] on the others. `received`: of watched layers before.

        Returns what the next stage gets, on the last one the sampled tokens; None if there was nothing to compute.
        Raises StepError for a gap in the steps or inputs that do not match the segments.
        """
        started = time.monotonic()
        computed = self._compute(header, inputs)
        if computed is None:
            return None
        outputs, own, places = computed
        if self.others is not None:
            self.others.finish()
        states = (*received, *own)
        tokens = self._sampler.sample(header.segments, outputs) if self.role.head and header.refill is None else []
        if outputs.is_cuda:  # launches come back at once; what follows waits for them anyway
            torch.cuda.current_stream(outputs.device).synchronize()
        seconds = time.monotonic() - started
        self._count(header, seconds)
        weights = self._holdings.weights
        slowest = max(header.seconds, seconds)
        if self.role.head:
            result = StepResult(header.replica, header.epoch, header.step, tokens, weights, slowest)
            return Answered(result, states, places)
        return Passed(structs.replace(header, weights=weights, seconds=slowest), outputs, states, places)

    def compute(self, header: FrameHeader, inputs: torch.Tensor) -> torch.Tensor | None:
        """The same without sampling: hidden states [tokens, hidden], on the last stage logits [rows, vocab] float32."""
        computed = self._compute(header, inputs)
        return None if computed is None else computed.outputs

    def _compute(self, header: FrameHeader, inputs: torch.Tensor) -> _Computed | None:
        with self.boundary.step(), torch.inference_mode():
            self._check(header, inputs)
            if self.others is not None:
                self.others.step(header, inputs)
                self.work.shared_bytes += (self.role.tensor_parallel - 1) * inputs.nbytes
            for operation in header.operations:
                self._apply(operation)
            if not header.segments:
                return None
            self._holdings.run_with(header.weights)
            batch = self._cache.plan(header.segments)
            if header.refill is not None:
                outputs = self._refill(header, batch, inputs)
                self._holdings.computed(header, [span.pages for span in batch.spans])
                return _Computed(outputs, [], batch.places)
            with self._first_times.step(self.model.kernel_sizes(batch)):
                decoding = header.draft or all(segment.length == 1 for segment in header.segments)
                strategy = strategy_for(self.role.strategies, batch.tokens, decoding=decoding)
                inputs = inputs.to(self.model.device)
                outputs = self.model.forward(inputs, batch, draft=header.draft, strategy=strategy)
            if self._cache.log is not None:
                self._cache.log.write(batch.places, outputs)
            self._holdings.computed(header, [span.pages for span in batch.spans])
            return _Computed(outputs, self.model.take_states(), batch.places)

    def _refill(self, header: FrameHeader, batch: Batch, inputs: torch.Tensor) -> torch.Tensor:
        """What the next stage gets: nothing, where none of its layers computes."""
        refill, log = Refill.of(header.refill, self.role), self._cache.log
        if refill.reads_log:
            kept = self._cache.kept_rows
            if kept is None:
                raise StepError(
                    f"step {header.step} begins with layer {refill.layers.start}, whose inputs this stage has not kept"
                )
            inputs = kept.read(batch.places)
        outputs = inputs
        if refill.layers:
            with self._first_times.step(self.model.kernel_sizes(batch)):
                outputs = self.model.forward_some(inputs.to(self.model.device), batch, refill.layers)
        self.work.refilled += batch.tokens * len(refill.layers)
        if log is not None and refill.writes_log:
            log.write(batch.places, outputs)
        return outputs if refill.sends else outputs[:0]

    def survey(self, survey: Survey) -> Survey:
        """With what this stage has kept worked in. Raises StepError behind the first step."""
        if self._next_step:
            raise StepError(
                f"a survey came behind step {self._next_step - 1}: what a stage has kept is asked before the first step alone"
            )
        with self.boundary.step():
            return self._holdings.survey(survey, begins_anywhere=self.model.begins_anywhere)

    @property
    def moved(self) -> tuple[int, int, int]:
        """Differs whenever its worker has got on: with what it has to do, with steps, or within one with layers. Read from any thread."""
        return self.work.turns, self._next_step, self.model.layers_begun

    @property
    def pools(self) -> Mapping[int, LayerPool]:
        """Of each layer, where its pages lie."""
        return self._cache.pools

    @property
    def blocks(self) -> Mapping[int, Content]:
        """What the pages of each block hold now: read between steps."""
        return self._holdings.blocks

    def holds(self, formed: int) -> Inheritance:
        """What its pages hold now, for whoever gets them while it serves. `formed`: as of `left`. From any thread."""
        return self._holdings.holds(formed)

    def inherit(self, inherited: Inheritance) -> None:
        """Before the survey: what its pages hold, with those that other stages have handed over."""
        self._holdings.inherit(inherited)

    def left(self, formed: int) -> Inheritance:
        """What its pages hold when it has ended, for whoever takes them. `formed`: the epoch in which its replica was."""
        return self._holdings.left(formed, self._cache.tables)

    def switch(self, change: Change) -> tuple[int, float]:
        """Give a layer its new weights between two steps, on all ranks; from any thread, while another one runs the steps.

        The others have read theirs (`reading`). Returns the number of the first step that computes with them and the seconds that the swap took. Raises BoundaryClosedError.
        """

        def swap() -> tuple[int, float]:
            started = time.perf_counter()
            if self.others is not None:  # they take it behind the same step: nothing overtakes on their connections
                self.others.swap_bits()
            change.apply()
            self.role = role_after(self.role, change)
            self._holdings.own = weights_by_layer(self.role, self.model.held)
            return self._next_step, time.perf_counter() - started

        return self.boundary.between_steps(swap)

    def _check(self, header: FrameHeader, inputs: torch.Tensor) -> None:
        if header.step != self._next_step:
            raise StepError(f"step {header.step} came where step {self._next_step} was due: a frame was lost")
        tokens = sum(segment.length for segment in header.segments)
        if header.refill is not None and not Refill.of(header.refill, self.role).receives:
            tokens = 0
        if inputs.shape[0] != tokens:
            raise StepError(f"step {header.step}: {inputs.shape[0]} rows of input for {tokens} tokens in its segments")
        self._next_step += 1

    def _apply(self, operation: KvOperation) -> None:
        match operation:
            case Open():
                self._holdings.open(operation)
                if self.role.head:
                    self._sampler.open(operation)
            case Free(sequence):
                self._sampler.free(sequence)
                self._holdings.free(sequence, self._cache.free(sequence))

    def _count(self, header: FrameHeader, seconds: float) -> None:
        self.work.steps += 1
        self.work.busy_seconds += seconds
        for segment in (
            () if header.draft or header.refill is not None else header.segments
        ):  # what is drafted is no token yet
            if segment.length == 1 or segment.sample > 1:  # drafts that are verified are no prompt
                self.work.decode_tokens += 1
            else:
                self.work.prefill_tokens += segment.length
