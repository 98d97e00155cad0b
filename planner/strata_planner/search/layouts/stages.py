"""What a stage costs in a pipeline of so many stages, for every number of sequences in flight at once: the search's tables.

Called by `pipelines`. All numbers come from the solver's Pricer, asked once per unlike stage; a layer counts as the mean of the
model's layers, which is exact where they are equal.
"""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.candidates import Pair, Pricer

Floats = npt.NDArray[np.float64]

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


class Stages:
    """Tables of one request's stages. `pair(stages, rung)`: the micro-batches that they are priced at."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.rungs = ladder(request.workload.concurrency)
        self.pricers = [Pricer(with_concurrency(request, rung)) for rung in self.rungs]
        self._tables: dict[tuple[int, int, int, bool, bool], StageTable] = {}
        self._pairs: dict[int, list[Pair]] = {}
        self._hops: dict[tuple[int, float, float, bool], Floats] = {}

    def pairs(self, stages: int) -> list[Pair]:
        """Of each rung: decoding is split evenly over the stages; prefills are as large as they gain from."""
        if stages not in self._pairs:
            enough = max(1, _PREFILL_TOKENS // self.request.workload.prompt_tokens)
            self._pairs[stages] = [Pair(min(-(-rung // stages), enough), -(-rung // stages)) for rung in self.rungs]
        return self._pairs[stages]

    def table(self, kind: int, group: DeviceGroup, stages: int, *, first: bool, head: bool) -> StageTable:
        """`kind` stands for the group's devices."""
        key = (kind, group.degree, stages, first, head)
        if key not in self._tables:
            self._tables[key] = self._table(group, stages, first=first, head=head)
        return self._tables[key]

    def hop(self, source: DeviceGroup, target: DeviceGroup, stages: int, *, back: bool) -> Floats:
        """[2, rungs] seconds of handing a micro-batch of each phase on."""
        link = self.request.cluster.link(source.leader, target.leader)
        key = (stages, link.gbps, link.latency_ms, back)
        if key not in self._hops:
            each = [
                pricer.hop(source, target, pair, back=back)
                for pricer, pair in zip(self.pricers, self.pairs(stages), strict=True)
            ]
            self._hops[key] = np.array(each).T
        return self._hops[key]

    def _table(self, group: DeviceGroup, stages: int, *, first: bool, head: bool) -> StageTable:
        rungs = [
            self._rung(pricer, group, pair, first=first, head=head)
            for pricer, pair in zip(self.pricers, self.pairs(stages), strict=True)
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
