"""One candidate as numbers: a fixed device order and micro-batch pair, to be split into layers and bits.

Built by `candidates`, bounded by `bounds`, solved by `exact` or `ilp`. Knows nothing of models, clusters or solvers. Layers that are
equal in every cost form one *run* of interchangeable units: a dense model without calibrated sensitivities is a single
run, and with a table each layer is a run of one unit, which is LLM-PQ's z[i,j,b].
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

Key = tuple[int, int, int]  # run, stage, bits
Counts = dict[Key, int]

_ROUNDING = 1e-9  # of a sum


@dataclass(frozen=True)
class Run:
    """`units` consecutive units of `layers_per_unit` equal layers. `omega[bits]` is of one unit."""

    units: int
    layers_per_unit: int
    omega: Mapping[int, float]


@dataclass(frozen=True)
class Room:
    """Bytes that a stage's units may fill on each of its devices: fixed parts are taken off already. `quantized_bytes` and `dense_bytes`: what it needs
    more as soon as one of its units is below 16 bits or at 16; `mixed_bytes`: more still with both. `loading_...`: the same while weights are loaded,
    before there is KV.
    """

    capacity_bytes: int
    quantized_bytes: int
    loading_capacity_bytes: int
    loading_quantized_bytes: int
    mixed_bytes: int = field(default=0, kw_only=True)
    dense_bytes: int = field(default=0, kw_only=True)

    def room(self, bits: int) -> tuple[float, float]:
        """Bytes that are there for units of these bits alone: while serving, and while loading."""
        serving = self.capacity_bytes - (self.quantized_bytes if bits < 16 else self.dense_bytes)
        loading = self.loading_capacity_bytes - (self.loading_quantized_bytes if bits < 16 else 0)
        return max(0.0, serving), max(0.0, loading)


@dataclass(frozen=True)
class StageCosts(Room):
    """One stage of the order.

    Of one unit: `seconds[run][bits]` = (prefill, decode), bits that the device lacks are absent; `bytes[run][bits]` on each
    of the stage's devices with KV, `weight_bytes` without. `fixed` is what the stage adds to each micro-batch (the
    head); `transfer` hands the micro-batch on, `latency` is the part of it that keeps no link busy.
    """

    seconds: tuple[Mapping[int, tuple[float, float]], ...]
    bytes: tuple[Mapping[int, int], ...]
    weight_bytes: tuple[Mapping[int, int], ...]
    fixed_seconds: tuple[float, float] = (0.0, 0.0)
    transfer_seconds: tuple[float, float] = (0.0, 0.0)
    latency_seconds: float = 0.0

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for stages that units cannot tell apart."""
        seconds = tuple(tuple(sorted(each.items())) for each in self.seconds)
        sizes = tuple(tuple(sorted(each.items())) for each in (*self.bytes, *self.weight_bytes))
        serving = (self.capacity_bytes, self.quantized_bytes, self.dense_bytes, self.mixed_bytes)
        loading = (self.loading_capacity_bytes, self.loading_quantized_bytes)
        return (*serving, *loading, self.fixed_seconds, seconds, sizes)


def joined(ranks: Sequence[StageCosts]) -> StageCosts:
    """Of a stage whose unlike devices have such memory each, in bytes of the one with most room: what fills a part of any device's room fills no less of
    that one's. So whatever fits what is told here fits every device; the other way too, where one of them is the fullest at all bits.
    """
    if len(ranks) == 1:
        return ranks[0]
    serving = [each.capacity_bytes for each in ranks]
    loading = [each.loading_capacity_bytes for each in ranks]
    if min(*serving, *loading) <= 0:
        return replace(ranks[0], capacity_bytes=-1)

    def fullest(values: Sequence[int], rooms: Sequence[int]) -> int:
        return max(-(-value * max(rooms) // room) for value, room in zip(values, rooms, strict=True))

    def tables(name: str, rooms: Sequence[int]) -> tuple[dict[int, int], ...]:
        runs = zip(*(getattr(each, name) for each in ranks), strict=True)
        return tuple({bits: fullest([size[bits] for size in run], rooms) for bits in run[0]} for run in runs)

    return replace(
        ranks[0],
        capacity_bytes=max(serving),
        quantized_bytes=fullest([each.quantized_bytes for each in ranks], serving),
        dense_bytes=fullest([each.dense_bytes for each in ranks], serving),
        mixed_bytes=fullest([each.mixed_bytes for each in ranks], serving),
        loading_capacity_bytes=max(loading),
        loading_quantized_bytes=fullest([each.loading_quantized_bytes for each in ranks], loading),
        bytes=tables("bytes", serving),
        weight_bytes=tables("weight_bytes", loading),
    )


@dataclass(frozen=True)
class Problem:
    """Weights of the objective: how often the slowest stage counts beside the sum over stages, in each phase.

    The phases are LLM-PQ's prefill and decode, or, of a pipeline that is never empty, what prompts add to a step and a step that decodes.
    """

    runs: tuple[Run, ...]
    stages: tuple[StageCosts, ...]
    slowest_prefill: float  # ceil(B/eta) - 1
    slowest_decode: float  # (ceil(B/xi) - 1) * (n-1)
    sum_decode: float  # n - 1
    theta: float
    penalty_bound: float = math.inf  # of the sum of omega

    @property
    def options(self) -> list[Key]:
        """Every (run, stage, bits) that the stage's device can run."""
        return [
            (r, j, bits)
            for r, run in enumerate(self.runs)
            for j, stage in enumerate(self.stages)
            for bits in run.omega
            if bits in stage.seconds[r]
        ]

    @property
    def signature(self) -> tuple[object, ...] | None:
        """Equal for problems that differ at most in their hops: with a single run the order of the stages does not matter.

        None with several runs, whose order does.
        """
        if len(self.runs) > 1:
            return None
        weights = (self.slowest_prefill, self.slowest_decode, self.sum_decode)
        return (*weights, *sorted(stage.signature for stage in self.stages))

    @property
    def hops(self) -> tuple[float, ...]:
        """All that the hops add to the objective: the slowest and the sum, in both phases. Less is never worse."""
        prefill, decode = zip(*(stage.transfer_seconds for stage in self.stages), strict=True)
        return max(prefill), max(decode), sum(prefill), sum(decode)

    def stage_seconds(self, counts: Counts, j: int) -> tuple[float, float]:
        """Prefill and decode seconds of one micro-batch on stage j."""
        prefill, decode = self.stages[j].fixed_seconds
        for (r, stage, bits), count in counts.items():
            if stage == j:
                unit = self.stages[j].seconds[r][bits]
                prefill += count * unit[0]
                decode += count * unit[1]
        return prefill, decode

    def free_bytes(self, counts: Counts, j: int) -> int:
        """What stage j has left while serving or while loading, whichever is less; negative: its units do not fit."""
        stage = self.stages[j]
        mine = [(r, bits, count) for (r, place, bits), count in counts.items() if place == j and count]
        quantized = any(bits < 16 for _, bits, _ in mine)
        dense = any(bits >= 16 for _, bits, _ in mine)
        serving = sum(count * stage.bytes[r][bits] for r, bits, count in mine)
        serving += (
            quantized * stage.quantized_bytes + dense * stage.dense_bytes + (quantized and dense) * stage.mixed_bytes
        )
        loading = sum(count * stage.weight_bytes[r][bits] for r, bits, count in mine)
        loading += quantized * stage.loading_quantized_bytes
        return min(stage.capacity_bytes - serving, stage.loading_capacity_bytes - loading)

    @property
    def pooled(self) -> bool:
        """Whether a byte of one stage is worth a byte of any other: layers take as much on each."""
        return all(stage.bytes == self.stages[0].bytes for stage in self.stages)

    def latency_seconds(self, counts: Counts) -> float:
        """LLM-PQ's latency of the whole batch, hops included."""
        return self.latency_of(self.all_seconds(counts))

    def all_seconds(self, counts: Counts) -> list[tuple[float, float]]:
        """Of every stage, in one pass over the counts."""
        prefill, decode = ([stage.fixed_seconds[phase] for stage in self.stages] for phase in (0, 1))
        for (r, j, bits), count in counts.items():
            unit = self.stages[j].seconds[r][bits]
            prefill[j] += count * unit[0]
            decode[j] += count * unit[1]
        return list(zip(prefill, decode, strict=True))

    def latency_of(self, times: Sequence[tuple[float, float]]) -> float:
        """The same of stages that take so many seconds in each phase."""
        hops = [stage.transfer_seconds for stage in self.stages]
        times = [*times, *hops]
        return (
            self.slowest_prefill * max(each[0] for each in times)
            + self.slowest_decode * max(each[1] for each in times)
            + sum(each[0] for each in times)
            + self.sum_decode * sum(each[1] for each in times)
        )

    def penalty(self, counts: Counts) -> float:
        """Sum of omega, before theta."""
        return sum(count * self.runs[r].omega[bits] for (r, _, bits), count in counts.items())

    def objective(self, counts: Counts) -> float:
        return self.latency_seconds(counts) + self.theta * self.penalty(counts)

    def is_feasible(self, counts: Counts) -> bool:
        """Every unit once, no stage empty, within memory and the bound of the penalty. (The order of runs is the caller's to keep.)"""
        placed = [sum(count for (r, _, _), count in counts.items() if r == run) for run in range(len(self.runs))]
        used = {j for (_, j, _), count in counts.items() if count}
        return (
            placed == [run.units for run in self.runs]
            and used == set(range(len(self.stages)))
            and all(self.free_bytes(counts, j) >= 0 for j in range(len(self.stages)))
            and self.penalty(counts) <= self.penalty_bound * (1 + _ROUNDING)
        )


class StopReason(Enum):
    """Why the solver stopped."""

    PROVED = "proved"  # the whole space was covered
    TIME_LIMIT = "time limit"
    SETTLED = "nothing better found for long"
    WORK_LIMIT = "limit of work"
    ORDER_LIMIT = "order limit"  # more device orders than are looked at


class SolutionStatus(Enum):
    """What is held afterwards."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"  # nothing says that there is no better one
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"  # stopped before anything was found


@dataclass(frozen=True)
class Solution:
    """`counts`: units per (run, stage, bits), zeros left out; empty without a solution. `bound`: no split is below it."""

    status: SolutionStatus
    stop: StopReason
    counts: Counts = field(default_factory=dict)
    objective: float = float("inf")
    bound: float = float("-inf")
