"""A stage to measure: layers of a model's shapes with random weights, loaded and run exactly as a slot does it.

Used by `survey` and by benchmarks. The clock stands at the first layer's entry and at the last one's exit, so that a step falls apart into
its layers and the rest (reading and writing the frame, planning the batch, the embedding or the head) without a difference of two noisy figures.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.frames import (
    FrameHeader,
    Free,
    KvOperation,
    Open,
    Sampling,
    Segment,
    data_decoder,
    encode,
)
from strata_planner.contract.plan import MicroBatch
from strata_planner.contract.roles import Neighbour, Role
from strata_planner.contract.rows import padded_rows
from strata_runtime import huge_pages
from strata_runtime.formats import QuantLinear
from strata_runtime.formats.float8.block_linear import BlockFloat8Linear
from strata_runtime.formats.float8.float8_linear import Float8Linear
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.formats.kernels import (
    BLOCK_FLOAT8_KERNELS,
    CHANNEL_KERNELS,
    FLOAT8_KERNELS,
    GROUP_KERNELS,
    PLANE_KERNELS,
    STATIC_KERNELS,
    Kernel,
    select,
)
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.rounded.rounded_linear import ChannelLinear, GroupLinear, PackedChannelLinear
from strata_runtime.formats.static8.static_linear import StaticLinear
from strata_runtime.loading.load import load_stage
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.scheduler.blocks import OwnBlocks
from strata_runtime.slot.role_cache import cache_of
from strata_runtime.stage.executor import Passed, StageExecutor
from strata_runtime.stage.tensors import from_bytes, to_bytes

PAGE_TOKENS = 16
_TABLES: dict[type[QuantLinear], tuple[Kernel[Any], ...]] = {
    ChannelLinear: CHANNEL_KERNELS,
    GroupLinear: GROUP_KERNELS,
    AnyLinear: PLANE_KERNELS,
    Float8Linear: FLOAT8_KERNELS,
    BlockFloat8Linear: BLOCK_FLOAT8_KERNELS,
    StaticLinear: STATIC_KERNELS,
}


@dataclass(frozen=True)
class Taken:
    """Seconds of one layer, of what came before the first one, and of what came after the last one."""

    layer: float
    before: float
    after: float


@dataclass(frozen=True)
class StageSpec:
    """`formats`: of each layer, from layer `first` on. `head`: the last stage, which gets hidden states; else the first, which embeds."""

    formats: tuple[FormatName, ...]
    compute_type: ComputeType
    cached_tokens: int
    positions: int
    head: bool = False
    first: int = 0
    kv_bits: int = 16


class ProfiledStage:
    """One thread's stage on one device; works are prepared, then run any number of times."""

    def __init__(self, model_path: Path, spec: StageSpec, device: torch.device) -> None:
        self.spec = spec
        role = role_of(spec)
        self.model = load_stage(role, model_path, lambda *_: None, device)
        huge_pages.wait()  # it would be gathered beside what is timed
        self.cache = cache_of(role, self.model)
        self._executor = StageExecutor(role, self.model, self.cache)
        self._blocks = OwnBlocks(role.replica_page_budget, PAGE_TOKENS)
        self._step = 0
        self._sequences = 0
        self.row_numbers: set[int] = set()  # that steps had, padded: what a processor has kernels for
        self._entered = self._left = 0.0
        self.clock = clock_of(device)
        layers = self.model.layers
        layers[0].register_forward_pre_hook(self._enter)
        layers[-1].register_forward_hook(self._leave)

    def prepare(self, work: Work) -> None:
        """Give every sequence its cached positions; what they hold does not change how long they take."""
        self._send(list(map(Free, range(self._sequences))), work=None)
        for number in range(self._sequences):
            self._blocks.free(number)
        self._sequences = work.sequences
        self._send([Open(number, Sampling()) for number in range(work.sequences)], work=None)
        self.cache.plan(self._blocks.deal(segment for segment in _cached(work) if segment.length))

    def run(self, work: Work) -> Taken:
        """One step. Every run of it starts where the first one did, so that what the last one wrote is forgotten."""
        self.row_numbers.add(padded_rows(work.total_tokens))
        return self._send([], work)

    def kernels(self, rows: int) -> str:
        """Names of the kernels that a step of so many rows multiplies with, in this stage's first layer."""
        linears = [module for module in self.model.layers[0].modules() if isinstance(module, QuantLinear)]
        names = {_kernel(linear, self._rows(rows, linear)) for linear in linears}
        return "+".join(sorted(names)) or "dense"

    def _rows(self, count: int, linear: QuantLinear) -> Tensor:
        return torch.empty(count, linear.in_features, dtype=self.model.dtype, device=self.model.device)

    def _send(self, operations: list[KvOperation], work: Work | None) -> Taken:
        segments = self._blocks.deal(work.segments(int(self.spec.head))) if work else []
        hidden, dtype = self.model.hidden_size, self.spec.compute_type
        header = FrameHeader(0, 1, self._step, "", segments, operations, dtype, hidden)
        body = self._body(work) if work else b""
        self._step += 1
        started = self.clock()
        received = data_decoder.decode(encode(header))
        assert isinstance(received, FrameHeader)
        inputs = from_bytes(bytearray(body), dtype, hidden) if self.spec.head else self._tokens(work)
        output = self._executor.run(received, inputs)
        if isinstance(output, Passed):
            to_bytes(output.hidden)
        ended = self.clock()
        count = len(self.spec.formats)
        return Taken((self._left - self._entered) / count, self._entered - started, ended - self._left)

    def _body(self, work: Work) -> bytes:
        if not self.spec.head:
            return b""
        hidden = torch.zeros(work.total_tokens, self.model.hidden_size, dtype=self.model.dtype)
        return bytes(to_bytes(hidden))

    @staticmethod
    def _tokens(work: Work | None) -> Tensor:
        return torch.zeros(work.total_tokens if work else 0, dtype=torch.int64)

    def _enter(self, *_: object) -> None:
        self._entered = self.clock()

    def _leave(self, *_: object) -> None:
        self._left = self.clock()


def clock_of(device: torch.device) -> Callable[[], float]:
    """A CUDA device is waited for. One thread's own time leaves out what other programs of a busy machine took; several threads
    wait for each other in it, so theirs is the wall's.
    """
    if device.type == "cuda":

        def after_kernels() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return after_kernels
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _cached(work: Work) -> list[Segment]:
    return [Segment(each.sequence, 0, each.start, 0) for each in work.segments()]


def _kernel(linear: QuantLinear, tokens: Tensor) -> str:
    if isinstance(linear, PackedChannelLinear):
        return "int8-native"
    if not isinstance(linear, GptqLinear):
        held: Any = linear.stored
        return select(_TABLES[type(linear)], linear.format, tokens, held).name
    linear.settle(tokens.dtype)
    return linear.kernel_name(tokens)


def role_of(spec: StageSpec) -> Role:
    """What a slot would be given to run it."""
    count = len(spec.formats)
    neighbour = Neighbour(slot="profiled", role=0)
    pages = -(-spec.cached_tokens // PAGE_TOKENS)
    return Role(
        replica=0,
        stage=1 if spec.head else 0,
        stages=2,
        devices=(),
        tensor_parallel=1,
        leader=not spec.head,
        layers=(spec.first, spec.first + count - 1),
        bits=(16,) * count,
        format=spec.formats,
        kv_bits=spec.kv_bits,
        kv_page_budget=pages,
        replica_page_budget=pages,
        page_tokens=PAGE_TOKENS,
        embedding=not spec.head,
        head=spec.head,
        model_uri="",
        compute_type=spec.compute_type,
        max_model_len=spec.positions,
        micro_batch=MicroBatch(prefill=1, decode=1, max_step_tokens=1),
        predicted_bytes=0,
        next=neighbour,
        previous=neighbour,
    )
