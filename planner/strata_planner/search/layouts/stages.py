"""What a stage costs in every way that a pipeline of so many stages may run: how its sequences are cut into micro-batches, how large the
chunks of prompts are, at which bits, with how many sequences in flight.

Called by `pipelines`. All numbers come from the solver's Pricer, asked once per unlike stage; a layer counts as the mean of the
model's layers, which is exact where they are equal.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import MAX_CHUNK_TOKENS, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.exact.candidates import Pair, Pricer
from strata_planner.search.steady import Load, micro_batches_of

Floats = npt.NDArray[np.float64]

_MANY_STAGES = 16  # of more, every other number of micro-batches is left out
EVENLY = 0  # chunks as small as prompts spread over nearly all steps
_CARRYING = (
    0.8  # the share of steps that carry prompts then; chunks that are smaller still would leave nothing for bursts
)
CHUNKS = (EVENLY, 256, MAX_CHUNK_TOKENS)
LEAST_CHUNK, _CHUNK_STEP = 128, 32  # tokens
_MORE_THAN_MEAN = 1.25  # sequences that a micro-batch may have, where prompts keep more of them from decoding


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `most`, itself included."""
    steps = {1, most}
    power = 2
    while power < most:
        steps |= {power, min(most, power * 3 // 2)}
        power *= 2
    return tuple(sorted(steps))


class Split(NamedTuple):
    """`parts`: the micro-batches of decoding, where there are as many sequences; `chunk`: tokens of prompts in a step, at least as many as
    are needed to spread them EVENLY.
    """

    parts: int
    chunk: int


def pair_of(load: Workload, split: Split, stages: int) -> Pair:
    """Of a pipeline of so many stages under this load."""
    decode = -(-load.concurrency // split.parts)
    chunk = max(split.chunk, evenly(load, decode))
    prefill = max(1, min(chunk // load.prompt_tokens, load.concurrency))
    most = min(chunk, prefill * load.prompt_tokens)
    decoding = math.ceil(_MORE_THAN_MEAN * load.output_tokens * most / load.prompt_tokens)
    return Pair(prefill, max(1, min(decode, decoding)), chunk, split.parts if split.parts < stages else 0)


def evenly(load: Workload, decoding: int) -> int:
    """Tokens of a chunk with which most steps of so many sequences carry one."""
    tokens = load.prompt_tokens * decoding / load.output_tokens / _CARRYING
    return min(MAX_CHUNK_TOKENS, max(LEAST_CHUNK, math.ceil(tokens / _CHUNK_STEP) * _CHUNK_STEP))


def splits(stages: int) -> list[Split]:
    """Ways worth a try: in decoding one micro-batch per stage, or 1, 2, 4, ... fewer and larger ones, so that reading weights is shared by
    more. Small chunks keep the steps of long pipelines alike and take less memory; large ones share reading weights too.
    """
    step = 1 if stages <= _MANY_STAGES else 2
    parts = dict.fromkeys([stages, *(1 << power for power in reversed(range(0, (stages - 1).bit_length(), step)))])
    chunks = CHUNKS if stages > 1 else CHUNKS[1:]
    return [Split(each, chunk) for each in parts for chunk in chunks]


@dataclass(frozen=True)
class StageTable:
    """Per column. `most_layers`: whole layers that fit; `prompts`, `decode`: seconds of a layer, what prompts add to a step and a step that
    decodes; `fixed_...`: the same of a step beside the layers.
    """

    most_layers: Floats
    prompts: Floats
    decode: Floats
    fixed_prompts: Floats
    fixed_decode: Floats


class Columns:
    """Every split of a pipeline of so many stages x every width x every number of sequences in flight, as arrays [columns]."""

    def __init__(self, pricers: list[Pricer], stages: int) -> None:
        request = pricers[0].request
        self.splits = splits(stages)
        self.pairs = [pair_of(each.request.workload, split, stages) for split in self.splits for each in pricers]
        self.widths = len(request.bits)
        rungs = [each.request.workload.concurrency for each in pricers] * len(self.splits)
        batches = [micro_batches_of(rung, stages, pair) for rung, pair in zip(rungs, self.pairs, strict=True)]
        steps = [
            pricer.prompts(pair).steps for pricer, pair in zip(pricers * len(self.splits), self.pairs, strict=True)
        ]
        loads = [self.widened([float(each) for each in values]) for values in (rungs, batches, steps)]
        self.load = Load(loads[0], loads[1], loads[2], request.workload.output_tokens)
        self.decode_size = self.widened([float(pair.decode) for pair in self.pairs])
        self.width = np.tile(np.arange(self.widths), len(self.pairs))
        self.split = np.repeat(np.arange(len(self.splits)), len(pricers) * self.widths)
        self.rung = np.tile(np.repeat(np.arange(len(pricers)), self.widths), len(self.splits))

    def widened(self, values: Iterable[float]) -> Floats:
        """From an array of pairs to one of columns: the same at every width."""
        return np.repeat(np.array(list(values)), self.widths)


class Stages:
    """Tables of one request's stages, by how its sequences run in micro-batches."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.rungs = ladder(request.workload.concurrency)
        self.pricers = [Pricer(with_concurrency(request, rung)) for rung in self.rungs]
        self._columns: dict[int, Columns] = {}
        self._tables: dict[tuple[int, int, int, bool, bool], StageTable] = {}
        self._hops: dict[tuple[int, float, float, bool], Floats] = {}
        self._costs: dict[tuple[int, int, int, Pair, bool, bool], tuple[Floats, ...]] = {}

    def columns(self, stages: int) -> Columns:
        if stages not in self._columns:
            self._columns[stages] = Columns(self.pricers, stages)
        return self._columns[stages]

    def table(self, kind: int, group: DeviceGroup, stages: int, *, first: bool, head: bool) -> StageTable:
        """`kind` stands for the group's devices; of a pipeline of so many stages."""
        key = (kind, group.degree, stages, first, head)
        if key not in self._tables:
            pairs = self.columns(stages).pairs
            of_pairs = [
                self._priced(kind, group, place % len(self.rungs), pair, first=first, head=head)
                for place, pair in enumerate(pairs)
            ]
            found = [np.concatenate(each) for each in zip(*of_pairs, strict=True)]
            self._tables[key] = StageTable(*found)
        return self._tables[key]

    def hop(self, source: DeviceGroup, target: DeviceGroup, stages: int, *, back: bool) -> Floats:
        """[3, columns] seconds of handing a step on: what prompts add to the link's, the link's, its latency."""
        link = self.request.cluster.link(source.leader, target.leader)
        key = (stages, link.gbps, link.latency_ms, back)
        if key not in self._hops:
            columns = self.columns(stages)
            each = [
                self.pricers[place % len(self.rungs)].hop(source, target, pair, back=back)
                for place, pair in enumerate(columns.pairs)
            ]
            prompts, decode = (columns.widened(found) for found in zip(*each, strict=True))
            latency = np.full(prompts.shape, link.latency_seconds)
            self._hops[key] = np.stack([prompts, decode - latency, latency])
        return self._hops[key]

    def _priced(
        self, kind: int, group: DeviceGroup, rung: int, pair: Pair, *, first: bool, head: bool
    ) -> tuple[Floats, ...]:
        """A table's entries of one pair; pipelines that differ in their number of stages share them."""
        alike = replace(pair, count=0)
        key = (kind, group.degree, rung, alike, first, head)
        if key not in self._costs:
            self._costs[key] = self._of_pair(self.pricers[rung], group, alike, first=first, head=head)
        return self._costs[key]

    def _of_pair(
        self, pricer: Pricer, group: DeviceGroup, pair: Pair, *, first: bool, head: bool
    ) -> tuple[Floats, ...]:
        costs = pricer.stage(group, pair, first=first, head=head)
        counts = [run.units for run in pricer.layer_runs]
        layers = pricer.request.model.num_layers
        most: list[float] = []
        seconds: tuple[list[float], list[float]] = ([], [])
        for bits in pricer.request.bits:
            runnable = all(bits in each for each in costs.seconds)
            size = sum(count * each[bits] for count, each in zip(counts, costs.bytes, strict=True)) / layers
            room = costs.capacity_bytes - (costs.quantized_bytes if bits < 16 else costs.dense_bytes)
            most.append(max(0.0, min(room // size, layers)) if runnable else 0.0)
            for phase, found in enumerate(seconds):
                total = (
                    sum(n * each[bits][phase] for n, each in zip(counts, costs.seconds, strict=True)) if runnable else 1
                )
                found.append(total / layers)
        fixed = (np.full(len(most), each) for each in costs.fixed_seconds)
        return np.array(most), np.array(seconds[0]), np.array(seconds[1]), *fixed

    @cached_property
    def penalty(self) -> dict[int, float]:
        """Of all layers at these bits."""
        runs = self.pricers[0].runs
        return {bits: sum(run.units * run.omega[bits] for run in runs) for bits in self.request.bits}


def with_concurrency(request: PlanRequest, sequences: int) -> PlanRequest:
    workload = msgspec.structs.replace(request.workload, concurrency=sequences)
    return replace(request, workload=workload)
