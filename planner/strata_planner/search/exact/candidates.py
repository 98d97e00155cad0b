"""Candidates: device orders x micro-batch pairs, each priced as a Problem.

Called by `search` and `feasibility`. The decode micro-batch is the batch split evenly over the stages and the prefill one
is at most that (LLM-PQ, arXiv 2403.01136, section 4.2, Optimization #1); of prefill sizes that make equally many
micro-batches only the smallest can be best.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import msgspec

from strata_planner.contract.formats import FormatName
from strata_planner.contract.steps import DRAFT_ROWS
from strata_planner.costs.communication import Exchange, hand_over_seconds, hidden_states_bytes, layer_collectives
from strata_planner.costs.draft_model import draft_weights_bytes, draft_working_bytes
from strata_planner.costs.latency import Latencies
from strata_planner.costs.memory import (
    PAGE_TOKENS,
    embedding_bytes,
    kv_bytes_per_token,
    layer_weights_bytes,
    state_bytes_per_sequence,
)
from strata_planner.costs.prompts import Prompts
from strata_planner.costs.shards import ALL, Portion, portion_of, portion_on
from strata_planner.costs.source import Phase, Rates, Timed, decode_phase, prefill_phase
from strata_planner.costs.working import StepShape, Storage, WorkingMemory, working_memory
from strata_planner.question.cluster import Accelerator, DeviceGroup
from strata_planner.question.model import LayerShape
from strata_planner.question.precision import formats_on
from strata_planner.question.request import MAX_CHUNK_TOKENS, ONE_PIPELINE, REFERENCES, PlanRequest
from strata_planner.search.exact.blocks import MOST_ENTRIES, table_entries
from strata_planner.search.exact.orders import Order
from strata_planner.search.exact.phases import BatchPhases, Pair, Phases, Sending, SteadyPhases
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
        self._units: dict[tuple[object, ...], Mapping[int, Mapping[int, tuple[float, float]]]] = {}
        self._begun: dict[tuple[object, ...], tuple[Mapping[int, float], ...]] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        self._working: dict[tuple[StepShape, Storage, bool, Portion], WorkingMemory] = {}
        self._drafts: dict[tuple[str, bytes, Pair], int] = {}
        self._profiles: dict[tuple[str, str, int], bytes] = {}
        self._formats: dict[tuple[bytes, ...], Mapping[int, FormatName]] = {}
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

    def max_step_tokens(self, pair: Pair) -> int:
        """Room for a micro-batch of prompts and for the sequences that decode beside them: without it every prompt would be
        cut in two as soon as anything decodes.
        """
        return min(pair.prefill * self.request.workload.prompt_tokens, pair.chunk) + pair.decode

    def working(self, group: DeviceGroup, pair: Pair, formats: Iterable[FormatName], *, head: bool) -> WorkingMemory:
        """Of a device of one stage whose layers are stored in `formats`."""
        return self._working_memory(group, pair, frozenset(formats), head=head)

    def beside_weights(self, group: DeviceGroup, pair: Pair, formats: Iterable[FormatName]) -> int:
        """Bytes of a last stage on these devices that serves layers stored in `formats`, without weights and KV."""
        return self._working_memory(group, pair, frozenset(formats), head=True).serving

    def _working_memory(
        self, group: DeviceGroup, pair: Pair, formats: frozenset[FormatName], *, head: bool
    ) -> WorkingMemory:
        request, step, portion = self.request, self._step_shape(pair), portion_on(group)
        storage = Storage.on(group.own, formats, request.compute_type, request.kv_bits)
        key = (step, storage, head, portion)
        if key not in self._working:
            shapes = dict.fromkeys(portion_of(layer, portion) for layer in self._shapes)
            model = msgspec.structs.replace(request.model, layers=tuple(shapes))
            self._working[key] = working_memory(model, step, storage, head=head)
        return self._working[key]

    def _step_shape(self, pair: Pair) -> StepShape:
        sampled = max(pair.decode, DRAFT_ROWS)
        return StepShape(self.max_step_tokens(pair), sampled, self.request.max_model_len)

    def draft_bytes(self, group: DeviceGroup, pair: Pair, *, first: bool, head: bool) -> int:
        """Of what drafts beside the leading stage on these devices, without its KV; of one stage of several with the hidden states on their way."""
        return first * self._drafter_bytes(group, pair) + (0 if first and head else self._states_bytes(pair))

    def _states_bytes(self, pair: Pair) -> int:
        """Of a step, of all layers that a head reads."""
        request = self.request
        tokens = len(request.served_speculation.fused) * self.max_step_tokens(pair)
        return hidden_states_bytes(request.model, tokens, request.compute_type)

    def _drafter_bytes(self, group: DeviceGroup, pair: Pair) -> int:
        request, small = self.request, self.request.draft_model
        if small is None:
            return 0
        key = (group.own.name, self._profile_of(group.own), pair)
        if key not in self._drafts:
            step = self._step_shape(pair)
            working = draft_working_bytes(small, group.own, step, request.compute_type, request.kv_bits)
            self._drafts[key] = draft_weights_bytes(small, request.compute_type) + working
        return self._drafts[key]

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
    def _shapes(self) -> tuple[LayerShape, ...]:
        """The model's unlike layers."""
        return tuple(dict.fromkeys(self.request.model.layers))

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
        return len(self._shapes) == 1

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
            of_shape = {
                shape: (self._weight_bytes(run, portion), self._kv_bytes(run, portion))
                for shape, run in self._run_of_shape.items()
            }
            weights, kv = zip(*(of_shape[shape] for shape in self._run_shapes), strict=True)
            both = tuple(
                {bits: size + more for bits, size in sizes.items()} for sizes, more in zip(weights, kv, strict=True)
            )
            self._unit_sizes[portion] = (both, weights)
        return self._unit_sizes[portion]

    def stage(self, group: DeviceGroup, pair: Pair, *, first: bool, head: bool) -> StageCosts:
        """What a stage costs by its devices and whether it is the first, the last or both; hops left out. Of unlike devices each step takes as long
        as the slowest, and memory is told in parts of each one's own (`joined`).
        """
        key = (tuple((self._profile_key(each), each.usable_bytes) for each in group.ranks), pair, first, head)
        if key not in self._stages:
            rooms = [self._room(each, pair, first=first, head=head) for each in group.ranks]
            seconds = self._units_seconds(group, pair)
            self._stages[key] = replace(
                joined(rooms),
                seconds=tuple(seconds[shape] for shape in self._run_shapes),
                fixed_seconds=self._fixed(group, pair, head=head),
            )
        return self._stages[key]

    def room(self, group: DeviceGroup, pair: Pair, *, first: bool, head: bool) -> tuple[StageCosts, ...]:
        """Memory of each of its unlike devices, without any seconds."""
        return tuple(self._room(each, pair, first=first, head=head) for each in group.ranks)

    def _room(self, group: DeviceGroup, pair: Pair, *, first: bool, head: bool) -> StageCosts:
        low = [name for bits, name in self.formats(group).items() if bits < 16]
        formats: tuple[list[FormatName], ...] = (["dense"], low or ["dense"], ["dense", *low])
        dense, quantized, mixed = (self._working_memory(group, pair, frozenset(each), head=head) for each in formats)
        tables = self.table_bytes(group, embedding=first, head=head)
        tables += self.draft_bytes(group, pair, first=first, head=head)
        pages = self.request.kv_pages
        further_kv = pages * first * self.request.draft_page_bytes + self.request.log_bytes(group, pages)
        sizes, weights = self.unit_sizes(portion_on(group))
        least = min(dense.serving, quantized.serving)
        parts_of_embedding = first and group.degree > 1  # a head reads the whole: such devices cannot lead one
        return StageCosts(
            capacity_bytes=-1
            if parts_of_embedding and self.request.served_speculation.has_head
            else group.usable_bytes - least - tables - further_kv,
            quantized_bytes=quantized.serving - least,
            dense_bytes=dense.serving - least,
            mixed_bytes=max(0, mixed.serving - max(quantized.serving, dense.serving)),
            loading_capacity_bytes=group.usable_bytes - dense.loading - tables,
            loading_quantized_bytes=max(0, mixed.loading - dense.loading),
            seconds=(),
            bytes=sizes,
            weight_bytes=weights,
        )

    @cached_property
    def _run_shapes(self) -> tuple[int, ...]:
        """For each run a number that it shares with the runs whose units have the same layers."""
        numbers: dict[tuple[LayerShape, ...], int] = {}
        layers = self.request.model.layers
        return tuple(
            numbers.setdefault(tuple(layers[i] for i in self._unit(run)), len(numbers)) for run in self.layer_runs
        )

    @cached_property
    def _run_of_shape(self) -> dict[int, LayerRun]:
        return dict(zip(reversed(self._run_shapes), reversed(self.layer_runs), strict=True))

    def table_bytes(self, group: DeviceGroup, *, embedding: bool, head: bool) -> int:
        """Of the embedding and the head on a device: tables are split by vocabulary, as in Megatron."""
        model, compute_type = self.request.model, self.request.compute_type
        size = embedding_bytes(model, embedding=embedding, head=head, compute_type=compute_type)
        return portion_on(group).rows(model.vocab_size, size)

    def layers_seconds(self, group: DeviceGroup, pair: Pair) -> Mapping[int, tuple[float, float]]:
        """Bits -> seconds of all layers on these devices in both phases, whatever their memory."""
        found = self._units_seconds(group, pair)
        each = [(run, found[shape]) for run, shape in zip(self.layer_runs, self._run_shapes, strict=True)]
        runnable = set.intersection(*(set(seconds) for _, seconds in each))
        return {
            bits: (
                sum(run.units * own[bits][0] for run, own in each),
                sum(run.units * own[bits][1] for run, own in each),
            )
            for bits in runnable
        }

    def _fixed(self, group: DeviceGroup, pair: Pair, *, head: bool) -> tuple[float, float]:
        """Of a micro-batch in each phase, beside the layers: the step, and the head's rows of logits where it is."""
        model = self.request.model
        link = self.request.cluster.slowest_link(group) if group.degree > 1 else None

        def beside(phase: Phase, rows: int) -> float:
            size = hidden_states_bytes(model, phase.total_tokens, self.request.compute_type)
            handed = hand_over_seconds(group.leader.name, group.degree, link, size) if link else 0.0
            return max(of_rank(each, phase, rows) for each in group.ranks) + handed

        def of_rank(each: DeviceGroup, phase: Phase, rows: int) -> float:
            rates = self._rates(each)
            logits = head * self.latencies.head(model, rates, rows).seconds
            return self.latencies.step(model, rates, phase).seconds + logits * portion_on(each).fraction(
                model.vocab_size
            )

        return self._phases.of_a_step(beside, pair)

    def _rates(self, group: DeviceGroup) -> Rates:
        return Rates(group.profile, self.request.compute_type, self.request.kv_bits, group.own.name)

    def _units_seconds(self, group: DeviceGroup, pair: Pair) -> Mapping[int, Mapping[int, tuple[float, float]]]:
        """Of each unlike unit, wherever in the pipeline these devices are."""
        key = (tuple(map(self._profile_key, group.ranks)), pair)
        if key not in self._units:
            self._units[key] = {
                shape: self._unit_seconds(run, group, pair) for shape, run in self._run_of_shape.items()
            }
        return self._units[key]

    def _unit_seconds(self, run: LayerRun, group: DeviceGroup, pair: Pair) -> Mapping[int, tuple[float, float]]:
        return {
            bits: self._phases.of_layers(partial(self._phase_seconds, run, group, bits), pair)
            for bits in self.formats(group)
            if all(bits in self.request.layer_bits(layer) for layer in self._unit(run))
        }

    def begun(self, group: DeviceGroup, pair: Pair) -> tuple[Mapping[int, float], ...]:
        """For each run, bits -> seconds that prompts add to a unit however few they are, in a pipeline that is never empty."""
        steady = SteadyPhases(self.request.workload)
        key = (tuple(map(self._profile_key, group.ranks)), pair)
        if key not in self._begun:
            found: dict[int, dict[int, float]] = {}
            for shape, run in self._run_of_shape.items():
                chosen = any(each.copies > each.active for layer in self._shards(run, ALL) for each in layer.linears)
                found[shape] = {
                    bits: steady.begun(partial(self._phase_seconds, run, group, bits), pair) if chosen else 0.0
                    for bits in self._units_seconds(group, pair)[shape]
                }
            self._begun[key] = tuple(found[shape] for shape in self._run_shapes)
        return self._begun[key]

    def formats(self, group: DeviceGroup) -> Mapping[int, FormatName]:
        """Bits -> the format in which these devices store them."""
        devices = group.devices if group.shares else group.devices[:1]
        key = tuple(map(self._profile_of, devices))
        if key not in self._formats:
            self._formats[key] = formats_on(self.request, group)
        return self._formats[key]

    def _phase_seconds(self, run: LayerRun, group: DeviceGroup, bits: int, phase: Phase) -> float:
        name = self.formats(group)[bits]
        key = (run.first, tuple(map(self._profile_key, group.ranks)), name, phase)
        if key not in self._seconds:
            layers = [self._layers_seconds(run, each, name, phase) for each in group.ranks]
            self._seconds[key] = max(layers) + run.layers_per_unit * self._collectives(group, phase)
        return self._seconds[key]

    def _layers_seconds(self, run: LayerRun, group: DeviceGroup, name: FormatName, phase: Phase) -> float:
        """Of a unit, on one device."""
        rates, layers = self._rates(group), self._shards(run, portion_on(group))
        return sum(self.latencies.layer(each, name, rates, phase).seconds for each in layers)

    def _collectives(self, group: DeviceGroup, phase: Phase) -> float:
        """Of one layer, inside the group."""
        if group.degree == 1:
            return 0.0
        return self._exchange(group, phase).seconds

    def _exchange(self, group: DeviceGroup, phase: Phase) -> Timed:
        size = hidden_states_bytes(self.request.model, phase.total_tokens, self.request.compute_type)
        exchange = Exchange(group.leader.name, group.degree, self.request.cluster.slowest_link(group), size)
        return layer_collectives(self.latencies.sources, exchange)

    def sources(self, found_bits: Iterable[int], candidate: Candidate, place: int) -> str:
        """Names of the sources that the seconds of a stage with these bits are from."""
        group = candidate.order[place]
        rates = self._rates(group)
        load = self.request.workload
        phases = (prefill_phase(load, candidate.prefill), decode_phase(load, candidate.decode))
        layer = portion_of(self.request.model.layers[0], portion_on(group))
        asked = [
            self.latencies.layer(layer, self.formats(group)[bits], rates, phase).source
            for bits in sorted(set(found_bits))
            for phase in phases
        ]
        if group.degree > 1:
            asked += [self._exchange(group, phase).source for phase in phases]
        return "; ".join(dict.fromkeys(asked))

    def _profile_key(self, group: DeviceGroup) -> tuple[bytes, Portion]:
        return self._profile_of(group.own), portion_on(group)

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
