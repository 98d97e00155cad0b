"""What a stage costs when a pipeline's sequences run in so many micro-batches, for every number of sequences in flight at once.

Called by `pipelines`. All numbers come from the solver's Pricer, asked once per unlike stage; a layer counts as the mean of the
model's layers, which is exact where they are equal.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.candidates import Pair, Pricer

Floats = npt.NDArray[np.float64]

_MANY_STAGES = 16  # of more, every other number of micro-batches is left out
_PREFILL_TOKENS = 512  # of a micro-batch, about: where prefilling is bound by arithmetic


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `most`, itself included."""
    steps = {1, most}
    power = 2
    while power < most:
        steps |= {power, min(most, power * 3 // 2)}
        power *= 2
    return tuple(sorted(steps))


@dataclass(frozen=True)
class StageTable:
    """Per rung of the ladder. `most_layers` [bits, rungs]: whole layers that fit; `prefill`, `decode` [bits, rungs]: seconds
    of a layer; `fixed` [2, rungs]: seconds of a micro-batch beside the layers.
    """

    most_layers: Floats
    prefill: Floats
    decode: Floats
    fixed: Floats


class Split(NamedTuple):
    """`parts`: the micro-batches of decoding, where there are as many sequences; `prefill`: the most sequences of one in prefill."""

    parts: int
    prefill: int


class Stages:
    """Tables of one request's stages, by how its sequences run in micro-batches."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.rungs = ladder(request.workload.concurrency)
        self.pricers = [Pricer(with_concurrency(request, rung)) for rung in self.rungs]
        self._tables: dict[tuple[int, int, Split, bool, bool], StageTable] = {}
        self._pairs: dict[Split, list[Pair]] = {}
        self._hops: dict[tuple[Split, float, float, bool], Floats] = {}

    def pairs(self, split: Split) -> list[Pair]:
        """Of each rung."""
        if split not in self._pairs:
            sizes = [-(-rung // split.parts) for rung in self.rungs]
            self._pairs[split] = [Pair(min(size, split.prefill), size) for size in sizes]
        return self._pairs[split]

    def splits(self, stages: int) -> list[Split]:
        """Micro-batches worth a try: in decoding one per stage, or 1, 2, 4, ... fewer and larger ones, so that reading weights is shared by
        more. Prefills as large as they gain from come first, single ones take less memory.
        """
        enough = max(1, _PREFILL_TOKENS // self.request.workload.prompt_tokens)
        step = 1 if stages <= _MANY_STAGES else 2
        parts = [stages, *(1 << power for power in reversed(range(0, (stages - 1).bit_length(), step)))]
        return [Split(each, prefill) for prefill in dict.fromkeys((enough, 1)) for each in parts]

    def table(self, kind: int, group: DeviceGroup, split: Split, *, first: bool, head: bool) -> StageTable:
        """`kind` stands for the group's devices."""
        key = (kind, group.degree, split, first, head)
        if key not in self._tables:
            self._tables[key] = self._table(group, split, first=first, head=head)
        return self._tables[key]

    def hop(self, source: DeviceGroup, target: DeviceGroup, split: Split, *, back: bool) -> Floats:
        """[2, rungs] seconds of handing a micro-batch of each phase on."""
        link = self.request.cluster.link(source.leader, target.leader)
        key = (split, link.gbps, link.latency_ms, back)
        if key not in self._hops:
            each = [
                pricer.hop(source, target, pair, back=back)
                for pricer, pair in zip(self.pricers, self.pairs(split), strict=True)
            ]
            self._hops[key] = np.array(each).T
        return self._hops[key]

    def _table(self, group: DeviceGroup, split: Split, *, first: bool, head: bool) -> StageTable:
        rungs = [
            self._rung(pricer, group, pair, first=first, head=head)
            for pricer, pair in zip(self.pricers, self.pairs(split), strict=True)
        ]
        most, prefill, decode, fixed = (np.array(each) for each in zip(*rungs, strict=True))
        return StageTable(most.T, prefill.T, decode.T, fixed.T)

    def _rung(self, pricer: Pricer, group: DeviceGroup, pair: Pair, *, first: bool, head: bool) -> tuple[Any, ...]:
        costs = pricer.stage(group, pair, first=first, head=head)
        counts = [run.units for run in pricer.layer_runs]
        layers = pricer.request.model.num_layers
        most: list[float] = []
        prefill: list[float] = []
        decode: list[float] = []
        for bits in pricer.request.bits:
            runnable = all(bits in each for each in costs.seconds)
            size = sum(count * each[bits] for count, each in zip(counts, costs.bytes, strict=True)) / layers
            room = costs.capacity_bytes - (costs.quantized_bytes if bits < 16 else costs.dense_bytes)
            most.append(max(0.0, min(room // size, layers)) if runnable else 0.0)
            for phase, found in enumerate((prefill, decode)):
                total = (
                    sum(n * each[bits][phase] for n, each in zip(counts, costs.seconds, strict=True)) if runnable else 1
                )
                found.append(total / layers)
        return most, prefill, decode, costs.fixed_seconds


def with_concurrency(request: PlanRequest, sequences: int) -> PlanRequest:
    workload = msgspec.structs.replace(request.workload, concurrency=sequences)
    return replace(request, workload=workload)
