"""What a stage costs in every way that a pipeline of so many stages may run: how its sequences are cut into micro-batches, how large the
chunks of prompts are, at which bits, with how many sequences in flight.

Called by `pipelines` and `ways`. All numbers come from the solver's Pricer, asked once per unlike stage; a layer counts as the mean of the
model's layers, which is exact where they are equal.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from strata_planner.contract.plan import steps_under_way
from strata_planner.contract.shares import Shares
from strata_planner.costs.prompts import most_prompts
from strata_planner.costs.shards import Portion
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import MAX_CHUNK_TOKENS, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.priced_group import PricedGroup
from strata_planner.search.steady import Load, micro_batches_of

Floats = npt.NDArray[np.float64]
Kind = tuple[tuple[int, ...], Shares]  # of a group's devices, and their shares

# Sequences for each stage: with more of them half as many micro-batches as stages, or fewer, gain nothing.
_MANY_EACH = 8
_FINE, _FINEST = 16, 256  # sequences in flight, from which on the ladder's steps are smaller
_MANY_STAGES = 16  # of more, every other number of micro-batches is left out
EVENLY = 0  # chunks as small as prompts spread over nearly all steps
_CARRYING = 0.8  # the share of steps that carry prompts then; with more of them nothing is left for bursts
CHUNKS = (EVENLY, 256, MAX_CHUNK_TOKENS)
LEAST_CHUNK = 128  # tokens
_SIZES = (*(power * each // 4 for power in (LEAST_CHUNK, 256, 512, 1024) for each in (4, 5, 6, 7)), MAX_CHUNK_TOKENS)
_WORK_OF_PAIR = 15  # of the micro-batches of a split and a load
_WORK_OF_ROOM, _WORK_OF_SECONDS = 90, 60  # of pricing them on a stage: room on each device, and seconds, at each width
_MORE_THAN_MEAN = 1.25  # sequences that a micro-batch may have, where prompts keep more of them from decoding


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, from there in quarters, 20, 24, 28, 32, 40, ..., and from 256 in eighths, up to `most`, itself included."""
    steps, power = {1, most}, 2
    while power < most:
        parts = 8 if power >= _FINEST else 4 if power >= _FINE else 2
        steps |= {min(most, power * (parts + each) // parts) for each in range(parts)}
        power *= 2
    return tuple(sorted(steps))


class Split(NamedTuple):
    """`parts`: the micro-batches of decoding, where there are as many sequences; `chunk`: tokens of prompts in a step, at least as many as
    are needed to spread them EVENLY.
    """

    parts: int
    chunk: int


def pair_of(request: PlanRequest, split: Split, stages: int) -> Pair:
    """Of a pipeline of so many stages."""
    load = request.workload
    decode = -(-load.concurrency // split.parts)
    chunk = request.chunk_tokens or max(split.chunk, evenly(load, decode))
    most = min(chunk, max(1, chunk // load.prompt_tokens) * load.prompt_tokens)
    decoding = math.ceil(_MORE_THAN_MEAN * load.output_tokens * most / load.prompt_tokens)
    return Pair(
        most_prompts(load, chunk), max(1, min(decode, decoding)), chunk, split.parts if split.parts < stages else 0
    )


def evenly(load: Workload, decoding: int) -> int:
    """Tokens of a chunk with which most steps of so many sequences carry one."""
    tokens = load.prompt_tokens * decoding / load.output_tokens / _CARRYING
    return _SIZES[min(bisect_left(_SIZES, tokens), len(_SIZES) - 1)]


def near_chunks(chunk: int) -> tuple[int, ...]:
    """The next smaller and larger sizes, and twice and half as much."""
    at = bisect_left(_SIZES, chunk)
    found = (_SIZES[max(0, at - 1)], _SIZES[min(at + 1, len(_SIZES) - 1)], chunk * 2, chunk // 2)
    return tuple(dict.fromkeys(min(MAX_CHUNK_TOKENS, max(LEAST_CHUNK, each)) for each in found))


def splits(stages: int) -> list[Split]:
    """Ways worth a try: in decoding one micro-batch per stage, or 1, 2, 4, ... fewer and larger ones, so that reading weights is shared by
    more. Small chunks keep the steps of long pipelines alike and take less memory; large ones share reading weights too.
    """
    step = 1 if stages <= _MANY_STAGES else 2
    parts = dict.fromkeys([stages, *(1 << power for power in reversed(range(0, (stages - 1).bit_length(), step)))])
    chunks = CHUNKS if stages > 1 else CHUNKS[1:]
    return [Split(each, chunk) for each in parts for chunk in chunks]


class StageTable:
    """Per column, the rows of `values`: layers that fit, as a fraction; seconds of a layer, what prompts add to a step and a step that decodes; the
    same of a step beside the layers; and of a layer, what prompts add however few tokens there are.
    """

    def __init__(self, values: Floats) -> None:
        self.values = values
        self.most_layers, self.prompts, self.decode = values[:3]


def grid(most: int) -> tuple[int, ...]:
    """1, 2, ..., 8, 10, 12, 14, 16, 20, ...: sizes of micro-batches that are priced, up to the first that is `most` or more."""
    sizes = [*range(1, 9)]
    while sizes[-1] < most:
        sizes += [sizes[-1] * quarters // 4 for quarters in (5, 6, 7, 8)]
    return tuple(sizes[: bisect_left(sizes, most) + 1])


class Columns:
    """Every split of a pipeline of so many stages x every width x every number of sequences in flight, as arrays [columns]. Costs of a
    micro-batch are between those of two `sizes`, at `low` and `high` with the weight `beyond` of the latter.
    """

    def __init__(self, pricers: list[Pricer], stages: int) -> None:
        request = pricers[0].request
        self.splits = splits(stages)
        self.widths = len(request.bits)
        self.pairs = [pair_of(each.request, split, stages) for split in self.splits for each in pricers]
        rungs = [each.request.workload.concurrency for each in pricers] * len(self.splits)
        batches = [micro_batches_of(rung, stages, pair) for rung, pair in zip(rungs, self.pairs, strict=True)]
        steps = [pricers[0].prompts(pair).steps for pair in self.pairs]
        most = [steps_under_way(pair.count, stages) for pair in self.pairs]
        in_flight, count, under, prompts = (self._each(values) for values in (rungs, batches, most, steps))
        load = request.workload
        lengths = (load.output_tokens, load.prompt_tokens, load.prompt_variation)
        self.load = Load(in_flight, count, under, prompts, *lengths, has_experts=request.model.has_experts)
        self.decode_size = self._each([pair.decode for pair in self.pairs])
        self.width = np.tile(np.arange(self.widths), len(self.pairs))
        self.rung = np.tile(np.repeat(np.arange(len(pricers)), self.widths), len(self.splits))
        worth = self._worth(rungs, stages)
        self.worth = np.repeat(np.array(worth), self.widths)
        first = next(pair for pair, each in zip(self.pairs, worth, strict=True) if each)
        self._place(request, [pair if each else first for pair, each in zip(self.pairs, worth, strict=True)])

    def _worth(self, rungs: list[int], stages: int) -> list[bool]:
        """Of pairs: none twice, and few micro-batches only where few sequences are in flight."""
        seen: set[tuple[int, Pair]] = set()
        found = []
        for rung, pair in zip(rungs, self.pairs, strict=True):
            few = pair.count and 2 * pair.count < stages and rung > _MANY_EACH * stages
            found.append(not few and (rung, pair) not in seen)
            seen.add((rung, pair))
        return found

    def _each(self, values: Sequence[float]) -> Floats:
        """From an array of pairs to one of columns: the same at every width."""
        return np.repeat(np.array(values, dtype=float), self.widths)

    def _place(self, request: PlanRequest, pairs: list[Pair]) -> None:
        known = grid(max(pair.decode for pair in pairs))
        sizes: dict[Pair, int] = {}
        low, high, beyond = [], [], []
        for pair in pairs:
            above = bisect_left(known, pair.decode)
            ends = known[max(0, above - (known[above] > pair.decode))], known[above]
            below_, above_ = (sizes.setdefault(Pair(pair.prefill, each, pair.chunk), len(sizes)) for each in ends)
            low.append(below_)
            high.append(above_)
            beyond.append((pair.decode - ends[0]) / max(1, ends[1] - ends[0]))
        self.sizes = tuple(sizes)
        self.low, self.high = (np.repeat(np.array(each, dtype=np.intp), len(request.bits)) for each in (low, high))
        self.beyond = self._each(beyond)

    def between(self, values: Floats) -> Floats:
        """[columns, ...] of values [sizes, ..., widths] of the micro-batches that are priced."""
        low, high = values[self.low, ..., self.width], values[self.high, ..., self.width]
        beyond = self.beyond.reshape(-1, *(1,) * (low.ndim - 1))
        between: Floats = low + beyond * (high - low)
        return between


# Numbers as deep as what is priced.
_Row = Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]


class _Memo:
    """An array [micro-batches, ...], each worked out once; `pairs` by their numbers."""

    def __init__(self, pairs: Sequence[Pair], priced: Callable[[Pair], _Row]) -> None:
        self._pairs, self._priced = pairs, priced
        self._rows = np.full(0, -1)  # of each number; -1: not yet known
        self._values: Floats | None = None

    def at(self, numbers: npt.NDArray[np.intp]) -> tuple[Floats, int]:
        """And how many were not known."""
        if len(self._rows) < len(self._pairs):
            self._rows = np.append(self._rows, np.full(len(self._pairs) - len(self._rows), -1))
        missing = numbers[self._rows[numbers] < 0]
        if missing.size:
            found = np.array([self._priced(self._pairs[number]) for number in missing])
            known = 0 if self._values is None else len(self._values)
            self._rows[missing] = np.arange(known, known + missing.size)
            self._values = found if self._values is None else np.concatenate([self._values, found])
        assert self._values is not None, "some were asked for"
        return self._values[self._rows[numbers]], missing.size


class Stages:
    """Tables of one request's stages, by how its sequences run in micro-batches. `work`: that they took, about a microsecond each."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.rungs = ladder(request.workload.concurrency)
        self.pricers = [Pricer(with_concurrency(request, rung)) for rung in self.rungs]
        self.work = 0
        self._columns: dict[int, Columns] = {}
        self._tables: dict[tuple[Kind, int, bool, bool], StageTable] = {}
        self._hops: dict[tuple[int, float, float, bool], Floats] = {}
        self._sending: dict[tuple[float, float, bool], _Memo] = {}
        self._numbers: dict[Pair, int] = {}
        self._pairs: list[Pair] = []
        # Of a pipeline of so many stages, the numbers of what its columns price.
        self._sizes: dict[int, npt.NDArray[np.intp]] = {}
        self._rooms: dict[tuple[PricedGroup, bool, bool], _Memo] = {}
        self._seconds: dict[tuple[PricedGroup, bool], _Memo] = {}
        self._layer_bytes: dict[Portion, tuple[Floats, Floats]] = {}

    def columns(self, stages: int) -> Columns:
        if stages not in self._columns:
            columns = self._columns[stages] = Columns(self.pricers, stages)
            self.work += _WORK_OF_PAIR * len(columns.pairs)
            self._sizes[stages] = np.array([self._number(pair) for pair in columns.sizes])
        return self._columns[stages]

    def table(self, kind: Kind, group: DeviceGroup, stages: int, *, first: bool, head: bool) -> StageTable:
        """`kind` stands for the group's devices and their shares; of a pipeline of so many stages."""
        key = (kind, stages, first, head)
        if key not in self._tables:
            columns, priced = self.columns(stages), self.pricers[0].priced(group)
            rooms = self._rooms_of(priced, self._sizes[stages], first=first, head=head)
            seconds = self._seconds_of(priced, self._sizes[stages], head=head)
            most = np.full(len(columns.width), np.inf)
            for rank, each in enumerate(priced.ranks):
                for moment, size in enumerate(self._bytes_of_a_layer(each.portion)):
                    room = rooms[columns.high, rank, columns.width, moment]
                    most = np.minimum(most, room / size[columns.rung, columns.width])
            self._tables[key] = StageTable(np.stack([most, *columns.between(seconds).T]))
        return self._tables[key]

    def hop(self, source: DeviceGroup, target: DeviceGroup, stages: int, *, back: bool) -> Floats:
        """[3, columns] seconds of handing a step on: what prompts add to the link's, the link's, its latency."""
        link = self.request.cluster.link(source.leader, target.leader)

        def of(pair: Pair) -> tuple[float, float]:
            prompts, decode = self.pricers[0].hop(source, target, pair, back=back)
            return prompts, decode - link.latency_seconds

        key = (stages, link.gbps, link.latency_ms, back)
        if key not in self._hops:
            columns, widths = self.columns(stages), len(self.request.bits)
            each, _ = self._sending.setdefault(key[1:], _Memo(self._pairs, of)).at(self._sizes[stages])
            prompts, send = columns.between(np.repeat(each[..., None], widths, axis=2)).T
            self._hops[key] = np.stack([prompts, send, np.full(send.shape, link.latency_seconds)])
        return self._hops[key]

    def _bytes_of_a_layer(self, portion: Portion) -> tuple[Floats, Floats]:
        """Each [rungs, widths] on a device of a group: with its KV of all sequences in flight, and without."""
        if portion not in self._layer_bytes:
            units = np.array([run.units for run in self.pricers[0].layer_runs]) / self.request.model.num_layers
            serving, loading = (
                np.array([[[each[bits] for bits in self.request.bits] for each in sizes] for sizes in of_rungs])
                for of_rungs in zip(*(pricer.unit_sizes(portion) for pricer in self.pricers), strict=True)
            )
            self._layer_bytes[portion] = np.einsum("u,ruw->rw", units, serving), np.einsum("u,ruw->rw", units, loading)
        return self._layer_bytes[portion]

    def _number(self, pair: Pair) -> int:
        number = self._numbers.setdefault(pair, len(self._pairs))
        if number == len(self._pairs):
            self._pairs.append(pair)
        return number

    def _rooms_of(self, group: PricedGroup, numbers: npt.NDArray[np.intp], *, first: bool, head: bool) -> Floats:
        """[sizes, ranks, widths, 2] Bytes that are there for layers while serving, and while loading; none for layers of bits that the devices do not run."""

        def of(pair: Pair) -> list[list[tuple[float, float]]]:
            runnable = group.layers(pair)
            return [
                [room.room(bits) if bits in runnable else (0.0, 0.0) for bits in self.request.bits]
                for room in group.rooms(pair, first=first, head=head)
            ]

        memo = self._rooms.setdefault((group, first, head), _Memo(self._pairs, of))
        rooms, priced = memo.at(numbers)
        self.work += _WORK_OF_ROOM * priced * rooms[0].size // 2
        return rooms

    def _seconds_of(self, group: PricedGroup, numbers: npt.NDArray[np.intp], *, head: bool) -> Floats:
        """[sizes, 5, widths] What StageTable tells, rooms left out."""
        widths, layers = self.request.bits, self.request.model.num_layers

        def of(pair: Pair) -> list[list[float]]:
            found, begun, fixed = group.layers(pair), group.layers_begun(pair), group.fixed(pair, head=head)
            each = [found.get(bits, (1.0, 1.0)) for bits in widths]
            of_layers = ([seconds[phase] / layers for seconds in each] for phase in range(2))
            beside = ([seconds] * len(widths) for seconds in fixed)
            return [*of_layers, *beside, [begun.get(bits, 0.0) / layers for bits in widths]]

        memo = self._seconds.setdefault((group, head), _Memo(self._pairs, of))
        seconds, priced = memo.at(numbers)
        self.work += _WORK_OF_SECONDS * priced * len(widths)
        return seconds

    @cached_property
    def penalty(self) -> dict[int, float]:
        """Of all layers at these bits."""
        runs = self.pricers[0].runs
        return {bits: sum(run.units * run.omega[bits] for run in runs) for bits in self.request.bits}


def with_concurrency(request: PlanRequest, sequences: int) -> PlanRequest:
    workload = msgspec.structs.replace(request.workload, concurrency=sequences)
    return replace(request, workload=workload)
