"""Candidates: device orders x micro-batch pairs, each priced as a Problem.

Called by `search` and `feasibility`. The decode micro-batch is the batch split evenly over the stages and the prefill one
is at most that (LLM-PQ, arXiv 2403.01136, section 4.2, Optimization #1); of prefill sizes that make equally many
micro-batches only the smallest can be best.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from strata_planner.contract.formats import FormatName
from strata_planner.costs.latency import Latencies
from strata_planner.costs.memory import (
    PAGE_TOKENS,
    kv_bytes_per_token,
    layer_weights_bytes,
    state_bytes_per_sequence,
)
from strata_planner.costs.prompts import Prompts
from strata_planner.costs.shards import ALL, Portion, portion_of, portion_on
from strata_planner.costs.source import decode_phase, prefill_phase
from strata_planner.question.cluster import Accelerator, DeviceGroup
from strata_planner.question.model import LayerShape
from strata_planner.question.request import MAX_CHUNK_TOKENS, ONE_PIPELINE, REFERENCES, PlanRequest
from strata_planner.search.exact.blocks import MOST_ENTRIES, table_entries
from strata_planner.search.exact.orders import Order
from strata_planner.search.exact.phases import BatchPhases, Pair, Phases, Sending, SteadyPhases
from strata_planner.search.exact.priced_group import PricedGroup, PricedRank, Pricing, Unit
from strata_planner.search.exact.problem import Problem, Run, StageCosts, joined

# LLM-PQ's Optimization #2: models of more than 30b parameters are decided in groups of two layers. Only needed where
# sensitivities make each layer different; equal layers are one run, whatever their number.
GROUPED_ABOVE_PARAMETERS = 30e9
_GROUPED_ABOVE_RUNS = 32


@dataclass(frozen=True)
class Candidate:
    order: Order
    pair: Pair

    @property
    def prefill(self) -> int:
        return self.pair.prefill

    @property
    def decode(self) -> int:
        return self.pair.decode


@dataclass(frozen=True)
class LayerRun:
    """Layers `first` .. `first` + units * layers_per_unit - 1, all of one shape and one sensitivity (when ungrouped)."""

    first: int
    units: int
    layers_per_unit: int


class Pricer:
    """Prices candidates of one request; remembers what they share. Not `grouped`: for what decides layer by layer, however many there are."""

    def __init__(self, request: PlanRequest, *, grouped: bool = True) -> None:
        self.request, self._grouped = request, grouped
        self.omega = request.omega
        self.latencies = Latencies(request.latency_sources)
        self._phases: Phases = (SteadyPhases if self.steady else BatchPhases)(request.workload)
        self._stages: dict[tuple[object, ...], StageCosts] = {}
        self._groups: dict[tuple[object, ...], PricedGroup] = {}
        self._profiles: dict[tuple[str, str, int], bytes] = {}
        self._unit_sizes: dict[Portion, tuple[tuple[dict[int, int], ...], tuple[dict[int, int], ...]]] = {}

    def pairs(self, stages: int) -> Iterator[Pair]:
        """xi = ceil(B / stages); eta from 1 to xi, once per number of micro-batches."""
        batch = self.request.workload.concurrency
        decode = -(-batch // stages)
        seen = set()
        for prefill in range(1, decode + 1):
            count = -(-batch // prefill)
            if count not in seen:
                seen.add(count)
                yield Pair(prefill, decode, self.request.chunk_tokens or MAX_CHUNK_TOKENS)

    def micro_batches(self, order: Order) -> Iterator[Candidate]:
        """The order with each of its pairs."""
        for pair in self.pairs(len(order)):
            yield Candidate(order, pair)

    def priced(self, group: DeviceGroup) -> PricedGroup:
        """What it costs, whatever stage it is."""
        key = self._key(group)
        if key not in self._groups:
            self._groups[key] = PricedGroup(self.pricing, group)
        return self._groups[key]

    def rank(self, group: DeviceGroup) -> PricedRank:
        """The device that the group looks at."""
        return self.priced(group).ranks[group.rank]

    def formats(self, group: DeviceGroup) -> Mapping[int, FormatName]:
        """Bits -> the format in which these devices store them."""
        return self.priced(group).formats

    def problem(self, candidate: Candidate) -> Problem:
        """Raises nothing: a stage that cannot hold even its fixed parts has a negative capacity."""
        last = len(candidate.order) - 1
        stages = []
        for place, group in enumerate(candidate.order):
            costs = self.stage(group, candidate.pair, first=place == 0, head=place == last)
            seconds, latency = self._transfer(candidate, place)
            stages.append(replace(costs, transfer_seconds=seconds, latency_seconds=latency))
        slowest_prefill, slowest_decode, sum_decode = self.weights(candidate.pair)
        return Problem(
            runs=self.runs,
            stages=tuple(stages),
            slowest_prefill=slowest_prefill,
            slowest_decode=slowest_decode,
            sum_decode=sum_decode,
            theta=self.request.theta,
            penalty_bound=math.inf if self.request.penalty_bound is None else self.request.penalty_bound,
        )

    def weights(self, pair: Pair) -> tuple[float, int, int]:
        """How often the slowest stage counts beside the sum, in each phase; how often the sum of decode counts."""
        return self._phases.weights(pair)

    @property
    def steady(self) -> bool:
        """Whether phases are those of a pipeline that is never empty; else LLM-PQ's."""
        return self.request.solver not in ONE_PIPELINE

    def prompts(self, pair: Pair) -> Prompts:
        """Of a step that carries any, in a pipeline that is never empty."""
        return SteadyPhases(self.request.workload).prompts(pair)

    @cached_property
    def least_weight_bytes(self) -> int:
        """Of all layers with their KV at the fewest bits, however many devices share them."""
        sizes, _ = self.unit_sizes(ALL)
        return sum(run.units * min(each.values()) for run, each in zip(self.runs, sizes, strict=True))

    @cached_property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """Consecutive layers that nothing tells apart; pairs of layers where that still leaves too much for the solver."""
        runs = self._runs_of(1)
        request = self.request
        big = request.model.parameters > GROUPED_ABOVE_PARAMETERS or (self.alike and request.solver not in REFERENCES)
        if (
            self._grouped
            and big
            and len(runs) > _GROUPED_ABOVE_RUNS
            and request.model.num_layers % 2 == 0
            and not self._decomposed
        ):
            return self._runs_of(2)
        return runs

    @property
    def alike(self) -> bool:
        """Whether layers differ in sensitivity alone."""
        return len(set(self.request.model.layers)) == 1

    @property
    def _decomposed(self) -> bool:
        """Whether the decomposition is asked for and its tables are small enough with every layer on its own."""
        request = self.request
        layers, one = request.model.num_layers, LayerRun(0, 1, 1)
        smallest = min(self._weight_bytes(one, ALL).values()) + self._kv_bytes(one, ALL)
        largest = max((each.usable_bytes for each in request.cluster.accelerators()), default=0)
        longest = min(layers - request.min_stages + 1, largest // smallest)
        return (
            self.alike
            and request.solver not in REFERENCES
            and table_entries(layers, longest, len(request.bits)) <= MOST_ENTRIES
        )

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(
            Run(
                run.units,
                run.layers_per_unit,
                {bits: sum(self.omega.of(layer, bits) for layer in self._unit(run)) for bits in self.request.bits},
            )
            for run in self.layer_runs
        )

    def _runs_of(self, group: int) -> tuple[LayerRun, ...]:
        layers, omega = self.request.model.layers, self.omega.omega
        bits = [str(each) for each in self.request.bits]
        each = [(shape, tuple(own.get(b, 0.0) for b in bits)) for shape, own in zip(layers, omega, strict=True)]
        keys = [tuple(each[at : at + group]) for at in range(0, len(layers), group)]
        runs: list[LayerRun] = []
        for at, key in enumerate(keys):
            if runs and key == keys[at - 1]:
                last = runs.pop()
                runs.append(LayerRun(last.first, last.units + 1, group))
            else:
                runs.append(LayerRun(at * group, 1, group))
        return tuple(runs)

    def _unit(self, run: LayerRun) -> range:
        """The layers of the run's first unit; the others equal it."""
        return range(run.first, run.first + run.layers_per_unit)

    def _shards(self, run: LayerRun, portion: Portion) -> list[LayerShape]:
        return [portion_of(self.request.model.layers[index], portion) for index in self._unit(run)]

    def _weight_bytes(self, run: LayerRun, portion: Portion) -> dict[int, int]:
        """Bits -> bytes of a unit on a device of a group."""
        request, layers = self.request, self._shards(run, portion)
        return {
            bits: max(
                sum(
                    layer_weights_bytes(each, name, request.compute_type, request.served_speculation) for each in layers
                )
                for name in request.formats[bits]
            )
            for bits in request.bits
        }

    def _kv_bytes(self, run: LayerRun, portion: Portion) -> int:
        """Of all pages, and of the state of all sequences."""
        request, layers = self.request, self._shards(run, portion)
        per_token = sum(kv_bytes_per_token(each, request.kv_bits, request.compute_type) for each in layers)
        per_sequence = sum(state_bytes_per_sequence(each, request.compute_type) for each in layers)
        return per_token * request.kv_pages * PAGE_TOKENS + per_sequence * request.workload.concurrency

    def unit_sizes(self, portion: Portion) -> tuple[tuple[dict[int, int], ...], tuple[dict[int, int], ...]]:
        """Per run, bits -> bytes of a unit with and without KV on a device of a group."""
        if portion not in self._unit_sizes:
            of_unit = {
                unit: (self._weight_bytes(run, portion), self._kv_bytes(run, portion))
                for unit, run in self._run_of_unit.items()
            }
            weights, kv = zip(*(of_unit[unit] for unit in self._unit_of_run), strict=True)
            both = tuple(
                {bits: size + more for bits, size in sizes.items()} for sizes, more in zip(weights, kv, strict=True)
            )
            self._unit_sizes[portion] = (both, weights)
        return self._unit_sizes[portion]

    def stage(self, group: DeviceGroup, pair: Pair, *, first: bool, head: bool) -> StageCosts:
        """What a stage costs by its devices and whether it is the first, the last or both; hops left out. Of unlike devices each step takes as long
        as the slowest, and memory is told in parts of each one's own (`joined`).
        """
        key = (self._key(group), pair, first, head)
        if key not in self._stages:
            priced = self.priced(group)
            units, fixed = priced.units(pair), priced.fixed(pair, head=head)
            seconds = tuple(units[unit] for unit in self._unit_of_run)
            rooms = zip(priced.ranks, priced.rooms(pair, first=first, head=head), strict=True)
            sizes = [(vars(room), *self.unit_sizes(rank.portion)) for rank, room in rooms]
            ranks = [
                StageCosts(**room, seconds=seconds, bytes=both, weight_bytes=weights, fixed_seconds=fixed)
                for room, both, weights in sizes
            ]
            self._stages[key] = joined(ranks)
        return self._stages[key]

    @cached_property
    def pricing(self) -> Pricing:
        return Pricing(self.request, self.latencies, self._phases, self._units)

    @cached_property
    def _units(self) -> Mapping[Unit, int]:
        counts = Counter[Unit]()
        for run, unit in zip(self.layer_runs, self._unit_of_run, strict=True):
            counts[unit] += run.units
        return counts

    @cached_property
    def _unit_of_run(self) -> tuple[Unit, ...]:
        known: dict[tuple[object, ...], Unit] = {}
        request, found = self.request, list[Unit]()
        for run in self.layer_runs:
            each = self._unit(run)
            bits = [bits for bits in request.bits if all(bits in request.layer_bits(layer) for layer in each)]
            told = tuple(request.model.layers[layer] for layer in each), tuple(bits)
            found.append(known.setdefault(told, Unit(*told)))
        return tuple(found)

    @cached_property
    def _run_of_unit(self) -> Mapping[Unit, LayerRun]:
        """The first."""
        return dict(zip(reversed(self._unit_of_run), reversed(self.layer_runs), strict=True))

    def sources(self, found_bits: Iterable[int], candidate: Candidate, place: int) -> str:
        """Names of the sources that the seconds of a stage with these bits are from."""
        priced = self.priced(candidate.order[place])
        rank, load = priced.ranks[0], self.request.workload
        phases = (prefill_phase(load, candidate.prefill), decode_phase(load, candidate.decode))
        layer = portion_of(self.request.model.layers[0], rank.portion)
        asked = [
            self.latencies.layer(layer, priced.formats[bits], rank.rates, phase).source
            for bits in sorted(set(found_bits))
            for phase in phases
        ]
        if priced.group.degree > 1:
            asked += [priced.exchange(phase).source for phase in phases]
        return "; ".join(dict.fromkeys(asked))

    def begun(self, group: DeviceGroup, pair: Pair) -> tuple[Mapping[int, float], ...]:
        """For each run, `PricedGroup.begun` of its units."""
        found = self.priced(group).begun(pair)
        return tuple(found[unit] for unit in self._unit_of_run)

    def _key(self, group: DeviceGroup) -> tuple[object, ...]:
        """Equal for groups that costs cannot tell apart."""
        return tuple(
            (each.own.name, self._profile_of(each.own), portion_on(each), each.usable_bytes) for each in group.ranks
        )

    def _profile_of(self, device: Accelerator) -> bytes:
        name = (device.node, device.type, device.index)
        if name not in self._profiles:
            self._profiles[name] = msgspec.json.encode(device.profile, order="sorted")
        return self._profiles[name]

    def _transfer(self, candidate: Candidate, place: int) -> tuple[tuple[float, float], float]:
        """Of handing a step from a stage to the next one, the first behind the last: seconds in each phase, and the link's latency in them."""
        order = candidate.order
        if len(order) == 1:
            return (0.0, 0.0), 0.0
        source, target = order[place], order[(place + 1) % len(order)]
        seconds = self.hop(source, target, candidate.pair, back=place == len(order) - 1)
        return seconds, self.request.cluster.link(source.leader, target.leader).latency_seconds

    def hop(self, source: DeviceGroup, target: DeviceGroup, pair: Pair, *, back: bool) -> tuple[float, float]:
        """To the next stage; from the last one (`back`) the sampled tokens go to the first."""
        link = self.request.cluster.link(source.leader, target.leader)
        # Wherever cuts will lie: at most so many, and so many come back.
        states = len(self.request.served_speculation.fused)
        return self._phases.of_a_hop(Sending(self.request.model, link, self.request.compute_type, back, states), pair)
