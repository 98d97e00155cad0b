"""What a stage on a group's devices costs by its micro-batch, in seconds and bytes; hops are left out.

Made by `candidates.Pricer`, one for all groups that costs cannot tell apart; remembers what it has told. Of unlike devices each step takes as
long as the slowest, and each has a memory of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import msgspec

from strata_planner.contract.formats import FormatName
from strata_planner.contract.steps import DRAFT_ROWS
from strata_planner.costs.communication import Exchange, hand_over_seconds, hidden_states_bytes, layer_collectives
from strata_planner.costs.draft_model import draft_weights_bytes, draft_working_bytes
from strata_planner.costs.latency import Latencies
from strata_planner.costs.memory import embedding_bytes
from strata_planner.costs.shards import Portion, portion_of, portion_on
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.costs.working import StepShape, Storage, WorkingMemory, working_memory
from strata_planner.question.cluster import DeviceGroup, LinkRate
from strata_planner.question.model import LayerShape
from strata_planner.question.precision import formats_on
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.phases import Pair, Phases, Seconds, SteadyPhases
from strata_planner.search.exact.problem import Room


@dataclass(frozen=True, eq=False)
class Unit:
    """Layers that are dealt together, and the bits that all of them have a format for. Told from others by being made once."""

    layers: tuple[LayerShape, ...]
    bits: tuple[int, ...]


@dataclass(frozen=True)
class Pricing:
    """What all groups of a request are priced by. `units`: the model's unlike ones, and how often each is there."""

    request: PlanRequest
    latencies: Latencies
    phases: Phases
    units: Mapping[Unit, int]
    _working: dict[tuple[StepShape, Storage, bool, Portion], WorkingMemory] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def working(self, pair: Pair, storage: Storage, portion: Portion, *, head: bool) -> WorkingMemory:
        """Of a device with such a portion, beside weights and KV."""
        key = (self.step_shape(pair), storage, head, portion)
        if key not in self._working:
            model = self.request.model
            shapes = dict.fromkeys(portion_of(layer, portion) for layer in dict.fromkeys(model.layers))
            own = msgspec.structs.replace(model, layers=tuple(shapes))
            self._working[key] = working_memory(own, key[0], storage, head=head)
        return self._working[key]

    def step_shape(self, pair: Pair) -> StepShape:
        return StepShape(self.max_step_tokens(pair), max(pair.decode, DRAFT_ROWS), self.request.max_model_len)

    def max_step_tokens(self, pair: Pair) -> int:
        """Room for a micro-batch of prompts and for the sequences that decode beside them: without it every prompt would be
        cut in two as soon as anything decodes.
        """
        return min(pair.prefill * self.request.workload.prompt_tokens, pair.chunk) + pair.decode


class PricedGroup:
    """A group's ranks, each a device, or what equal ones have in common."""

    def __init__(self, pricing: Pricing, group: DeviceGroup) -> None:
        self._pricing = pricing
        self.group = group
        self.formats: Mapping[int, FormatName] = formats_on(pricing.request, group)
        self.ranks = tuple(PricedRank(pricing, each, self.formats) for each in group.ranks)
        self._units: dict[Pair, Mapping[Unit, Mapping[int, Seconds]]] = {}
        self._of_layers: dict[Pair, Mapping[int, Seconds]] = {}
        self._begun: dict[Pair, Mapping[Unit, Mapping[int, float]]] = {}
        self._layers: dict[tuple[Unit, FormatName, Phase], float] = {}
        self._beside: dict[tuple[Phase, int, bool], float] = {}

    def rooms(self, pair: Pair, *, first: bool, head: bool) -> tuple[Room, ...]:
        """Of each rank."""
        return tuple(each.room(pair, first=first, head=head) for each in self.ranks)

    def units(self, pair: Pair) -> Mapping[Unit, Mapping[int, Seconds]]:
        """Bits -> seconds in both phases, of the bits that the devices and the unit's layers have."""
        if pair not in self._units:
            of_layers = self._pricing.phases.of_layers
            self._units[pair] = {
                unit: {
                    bits: of_layers(partial(self._seconds, unit, name), pair)
                    for bits, name in self.formats.items()
                    if bits in unit.bits
                }
                for unit in self._pricing.units
            }
        return self._units[pair]

    def begun(self, pair: Pair) -> Mapping[Unit, Mapping[int, float]]:
        """Bits -> seconds that prompts add to a unit however few they are, in a pipeline that is never empty."""
        if pair not in self._begun:
            steady = SteadyPhases(self._pricing.request.workload)
            self._begun[pair] = {
                unit: {bits: steady.begun(partial(self._seconds, unit, self.formats[bits]), pair) for bits in seconds}
                for unit, seconds in self.units(pair).items()
            }
        return self._begun[pair]

    def layers(self, pair: Pair) -> Mapping[int, Seconds]:
        """Bits that all layers have -> seconds of all of them, whatever their memory."""
        if pair not in self._of_layers:
            counts, found = self._pricing.units, self.units(pair)
            self._of_layers[pair] = {
                bits: (
                    sum(counts[unit] * seconds[bits][0] for unit, seconds in found.items()),
                    sum(counts[unit] * seconds[bits][1] for unit, seconds in found.items()),
                )
                for bits in self.formats
                if all(bits in seconds for seconds in found.values())
            }
        return self._of_layers[pair]

    def layers_begun(self, pair: Pair) -> Mapping[int, float]:
        """Bits -> `begun` of all layers that have them."""
        counts, found = self._pricing.units, self.begun(pair)
        return {bits: sum(counts[unit] * each.get(bits, 0.0) for unit, each in found.items()) for bits in self.formats}

    def fixed(self, pair: Pair, *, head: bool) -> Seconds:
        """Of a micro-batch in each phase, beside the layers: the step, and the head's rows of logits where it is."""
        return self._pricing.phases.of_a_step(partial(self._beside_layers, head=head), pair)

    def exchange(self, phase: Phase) -> Timed:
        """Of one layer, inside the group of several."""
        return layer_collectives(self._pricing.latencies.sources, Exchange(*self._joined_by, self._states_bytes(phase)))

    def _beside_layers(self, phase: Phase, rows: int, *, head: bool) -> float:
        key = (phase, rows, head)
        if key not in self._beside:
            handed = 0.0
            if self.group.degree > 1:
                handed = hand_over_seconds(*self._joined_by, self._states_bytes(phase))
            self._beside[key] = max(each.beside_layers(phase, rows * head) for each in self.ranks) + handed
        return self._beside[key]

    def _seconds(self, unit: Unit, name: FormatName, phase: Phase) -> float:
        key = (unit, name, phase)
        if key not in self._layers:
            found = max(each.seconds(unit, name, phase) for each in self.ranks)
            if self.group.degree > 1:
                found += len(unit.layers) * self.exchange(phase).seconds
            self._layers[key] = found
        return self._layers[key]

    @cached_property
    def _joined_by(self) -> tuple[str, int, LinkRate]:
        """What leads it, of how many, and the link that its collectives wait for."""
        group = self.group
        return group.leader.name, group.degree, self._pricing.request.cluster.slowest_link(group)

    def _states_bytes(self, phase: Phase) -> int:
        request = self._pricing.request
        return hidden_states_bytes(request.model, phase.total_tokens, request.compute_type)


class PricedRank:
    """One device of a group, or one of its equal devices, whose layers are stored in `formats` by their bits."""

    def __init__(self, pricing: Pricing, group: DeviceGroup, formats: Mapping[int, FormatName]) -> None:
        self._pricing, self._group, self.portion = pricing, group, portion_on(group)
        request = pricing.request
        self.rates = Rates(group.profile, request.compute_type, request.kv_bits, group.own.name)
        self._low = frozenset(name for bits, name in formats.items() if bits < 16)
        self._beside: dict[tuple[StepShape, bool], _Beside] = {}
        self._drafters: dict[StepShape, int] = {}
        self._usable: dict[tuple[bool, bool], tuple[int, int]] = {}

    def room(self, pair: Pair, *, first: bool, head: bool) -> Room:
        """Beside what is there whatever the layers."""
        dense, quantized, mixed = self._beside_weights(pair, head=head)
        usable, further_kv = self._usable_bytes(first=first, head=head)
        usable -= self.draft_bytes(pair, first=first, head=head)
        least = min(dense.serving, quantized.serving)
        parts_of_embedding = first and self._group.degree > 1  # a head reads the whole: such devices cannot lead one
        none = parts_of_embedding and self._pricing.request.served_speculation.has_head
        return Room(
            capacity_bytes=-1 if none else usable - least - further_kv,
            quantized_bytes=quantized.serving - least,
            dense_bytes=dense.serving - least,
            mixed_bytes=max(0, mixed.serving - max(quantized.serving, dense.serving)),
            loading_capacity_bytes=usable - dense.loading,
            loading_quantized_bytes=max(0, mixed.loading - dense.loading),
        )

    def working(self, pair: Pair, formats: Iterable[FormatName], *, head: bool) -> WorkingMemory:
        """Of a stage whose layers are stored in `formats`."""
        return self._pricing.working(pair, self._storage(formats), self.portion, head=head)

    def table_bytes(self, *, embedding: bool, head: bool) -> int:
        """Of the embedding and the head: tables are split by vocabulary, as in Megatron."""
        model, compute_type = self._pricing.request.model, self._pricing.request.compute_type
        size = embedding_bytes(model, embedding=embedding, head=head, compute_type=compute_type)
        return self.portion.rows(model.vocab_size, size)

    def draft_bytes(self, pair: Pair, *, first: bool, head: bool) -> int:
        """Of what drafts beside the leading stage, without its KV; of one stage of several with the hidden states on their way."""
        return first * self._drafter_bytes(pair) + (0 if first and head else self._states_bytes(pair))

    def seconds(self, unit: Unit, name: FormatName, phase: Phase) -> float:
        layer = self._pricing.latencies.layer
        return sum(layer(each, name, self.rates, phase).seconds for each in self._parts[unit])

    def beside_layers(self, phase: Phase, rows: int) -> float:
        """Seconds of a step with so many rows of logits."""
        model, latencies = self._pricing.request.model, self._pricing.latencies
        logits = latencies.head(model, self.rates, rows).seconds if rows else 0.0
        return latencies.step(model, self.rates, phase).seconds + logits * self.portion.fraction(model.vocab_size)

    def _usable_bytes(self, *, first: bool, head: bool) -> tuple[int, int]:
        """Without the tables; and what there is of KV beside that of layers."""
        if (first, head) not in self._usable:
            request, pages = self._pricing.request, self._pricing.request.kv_pages
            usable = self._group.usable_bytes - self.table_bytes(embedding=first, head=head)
            further = pages * first * request.draft_page_bytes + request.log_bytes(self._group, pages)
            self._usable[first, head] = usable, further
        return self._usable[first, head]

    def _beside_weights(self, pair: Pair, *, head: bool) -> "_Beside":
        step = self._pricing.step_shape(pair)
        if (step, head) not in self._beside:
            found = [self._pricing.working(pair, each, self.portion, head=head) for each in self._stored]
            self._beside[step, head] = _Beside(found[0], *(found[1:] or found * 2))
        return self._beside[step, head]

    @cached_property
    def _stored(self) -> tuple[Storage, ...]:
        """As _Beside tells them, or the first alone."""
        each: list[Iterable[FormatName]] = [{"dense"}, self._low, {"dense", *self._low}]
        return tuple(map(self._storage, each if self._low else each[:1]))

    def _storage(self, formats: Iterable[FormatName]) -> Storage:
        request = self._pricing.request
        return Storage.on(self._group.own, frozenset(formats), request.compute_type, request.kv_bits)

    @cached_property
    def _parts(self) -> Mapping[Unit, tuple[LayerShape, ...]]:
        """Of each layer of a unit."""
        units = self._pricing.units
        return {unit: tuple(portion_of(layer, self.portion) for layer in unit.layers) for unit in units}

    def _states_bytes(self, pair: Pair) -> int:
        """Of a step, of all layers that a head reads."""
        request = self._pricing.request
        tokens = len(request.served_speculation.fused) * self._pricing.max_step_tokens(pair)
        return hidden_states_bytes(request.model, tokens, request.compute_type)

    def _drafter_bytes(self, pair: Pair) -> int:
        request, small = self._pricing.request, self._pricing.request.draft_model
        if small is None:
            return 0
        step = self._pricing.step_shape(pair)
        if step not in self._drafters:
            working = draft_working_bytes(small, self._group.own, step, request.compute_type, request.kv_bits)
            self._drafters[step] = draft_weights_bytes(small, request.compute_type) + working
        return self._drafters[step]


class _Beside(NamedTuple):
    """Of a stage whose layers are all at 16 bits, all at fewer, or both."""

    dense: WorkingMemory
    quantized: WorkingMemory
    mixed: WorkingMemory
