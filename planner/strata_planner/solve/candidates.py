"""Candidates: device orders x micro-batch pairs, each priced as a Problem.

Called by `search` and `feasibility`. The decode micro-batch is the batch split evenly over the stages and the prefill one
is at most that (LLM-PQ, arXiv 2403.01136, section 4.2, Optimization #1); of prefill sizes that make equally many
micro-batches only the smallest can be best.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from strata_planner.catalogue import CPU
from strata_planner.cluster import Accelerator
from strata_planner.contract.formats import DEFAULT_FORMAT_OF_BITS, FormatName
from strata_planner.costs.communication import hidden_states_seconds, sampled_tokens_seconds
from strata_planner.costs.latency import Rates, decode_phase, head_seconds, layer_seconds, prefill_phase
from strata_planner.costs.memory import (
    PAGE_TOKENS,
    StepShape,
    Storage,
    Temporaries,
    embedding_bytes,
    kv_bytes_per_token,
    layer_weights_bytes,
    temporaries,
)
from strata_planner.request import MAX_CHUNK_TOKENS, PlanRequest
from strata_planner.solve.orders import Order
from strata_planner.solve.problem import Problem, Run, StageCosts

# LLM-PQ's Optimization #2: models of more than 30b parameters are decided in groups of two layers. Only needed where
# sensitivities make each layer different; equal layers are one run, whatever their number.
GROUPED_ABOVE_PARAMETERS = 30e9
_GROUPED_ABOVE_RUNS = 32


@dataclass(frozen=True)
class Candidate:
    order: Order
    prefill: int  # eta
    decode: int  # xi


@dataclass(frozen=True)
class LayerRun:
    """Layers `first` .. `first` + units * layers_per_unit - 1, all of one shape and one sensitivity (when ungrouped)."""

    first: int
    units: int
    layers_per_unit: int


class Pricer:
    """Prices candidates of one request; remembers what they share."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.omega = request.omega
        self._seconds: dict[tuple[object, ...], float] = {}
        self._temporaries: dict[tuple[StepShape, Storage, bool], Temporaries] = {}
        self._profiles: dict[tuple[str, str, int], bytes] = {}

    def micro_batches(self, order: Order) -> Iterator[Candidate]:
        """xi = ceil(B / stages); eta from 1 to xi, once per number of micro-batches."""
        batch = self.request.workload.concurrency
        decode = -(-batch // len(order))
        seen = set()
        for prefill in range(1, decode + 1):
            count = -(-batch // prefill)
            if count not in seen:
                seen.add(count)
                yield Candidate(order, prefill, decode)

    def max_step_tokens(self, candidate: Candidate) -> int:
        prompt = candidate.prefill * self.request.workload.prompt_tokens
        return max(min(prompt, MAX_CHUNK_TOKENS), candidate.decode)

    def temporaries(self, candidate: Candidate, place: int, formats: Iterable[FormatName]) -> Temporaries:
        """Of one stage whose layers are stored in `formats`."""
        request = self.request
        step = StepShape(self.max_step_tokens(candidate), candidate.decode, request.max_model_len)
        storage = Storage(frozenset(formats), request.compute_type, candidate.order[place].name == CPU)
        head = place == len(candidate.order) - 1
        if (step, storage, head) not in self._temporaries:
            self._temporaries[step, storage, head] = temporaries(request.model, step, storage, head=head)
        return self._temporaries[step, storage, head]

    def problem(self, candidate: Candidate) -> Problem:
        """Raises nothing: a stage that cannot hold even its fixed parts has a negative capacity."""
        workload = self.request.workload
        batch, rounds = workload.concurrency, workload.output_tokens - 1
        return Problem(
            runs=self.runs,
            stages=tuple(self._stage(candidate, place) for place in range(len(candidate.order))),
            slowest_prefill=-(-batch // candidate.prefill) - 1,
            slowest_decode=(-(-batch // candidate.decode) - 1) * rounds,
            sum_decode=rounds,
            theta=self.request.theta,
        )

    @cached_property
    def layer_runs(self) -> tuple[LayerRun, ...]:
        """Consecutive layers that nothing tells apart; pairs of layers where that still leaves too many runs."""
        runs = self._runs_of(1)
        big = self.request.model.parameters > GROUPED_ABOVE_PARAMETERS
        if big and len(runs) > _GROUPED_ABOVE_RUNS and self.request.model.num_layers % 2 == 0:
            return self._runs_of(2)
        return runs

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(
            Run(
                run.units,
                run.layers_per_unit,
                {bits: sum(self._layer_bytes(layer, bits) for layer in self._unit(run)) for bits in self.request.bits},
                {bits: sum(self._weight_bytes(layer, bits) for layer in self._unit(run)) for bits in self.request.bits},
                {bits: sum(self.omega.of(layer, bits) for layer in self._unit(run)) for bits in self.request.bits},
            )
            for run in self.layer_runs
        )

    def _runs_of(self, group: int) -> tuple[LayerRun, ...]:
        layers = self.request.model.layers
        keys = [
            tuple(
                (layers[i], tuple(self.omega.of(i, bits) for bits in self.request.bits)) for i in range(at, at + group)
            )
            for at in range(0, len(layers), group)
        ]
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

    def _weight_bytes(self, index: int, bits: int) -> int:
        request = self.request
        return layer_weights_bytes(request.model.layers[index], DEFAULT_FORMAT_OF_BITS[bits], request.compute_type)

    def _layer_bytes(self, index: int, bits: int) -> int:
        """Weights and KV."""
        request = self.request
        per_token = kv_bytes_per_token(request.model.layers[index], request.kv_bits, request.compute_type)
        return self._weight_bytes(index, bits) + per_token * request.kv_pages * PAGE_TOKENS

    def _stage(self, candidate: Candidate, place: int) -> StageCosts:
        device = candidate.order[place]
        head = place == len(candidate.order) - 1
        dense = self.temporaries(candidate, place, ["dense"])
        low: list[FormatName] = [DEFAULT_FORMAT_OF_BITS[bits] for bits in self.request.bits if bits < 16]
        quantized = self.temporaries(candidate, place, low or ["dense"])
        mixed = self.temporaries(candidate, place, ["dense", *low])
        tables = embedding_bytes(
            self.request.model, embedding=place == 0, head=head, compute_type=self.request.compute_type
        )
        rates = Rates(device.profile, self.request.compute_type, self.request.kv_bits)
        fixed = (device.profile.step_overhead_seconds, device.profile.step_overhead_seconds)
        if head:
            fixed = (
                fixed[0] + head_seconds(self.request.model, rates, candidate.prefill),
                fixed[1] + head_seconds(self.request.model, rates, candidate.decode),
            )
        return StageCosts(
            capacity_bytes=device.usable_bytes - dense.serving - tables,
            quantized_bytes=quantized.serving - dense.serving,
            mixed_bytes=mixed.serving - quantized.serving,
            loading_capacity_bytes=device.usable_bytes - dense.loading - tables,
            loading_quantized_bytes=mixed.loading - dense.loading,
            seconds=tuple(self._unit_seconds(run, device, candidate) for run in self.layer_runs),
            fixed_seconds=fixed,
            transfer_seconds=self._transfer(candidate, place),
        )

    def _unit_seconds(
        self, run: LayerRun, device: Accelerator, candidate: Candidate
    ) -> Mapping[int, tuple[float, float]]:
        profile = device.profile
        return {
            bits: (
                self._phase_seconds(run, device, bits, ("prefill", candidate.prefill)),
                self._phase_seconds(run, device, bits, ("decode", candidate.decode)),
            )
            for bits in self.request.bits
            if DEFAULT_FORMAT_OF_BITS[bits] in profile.decode_efficiency.keys() & profile.prefill_efficiency.keys()
        }

    def _phase_seconds(self, run: LayerRun, device: Accelerator, bits: int, phase: tuple[str, int]) -> float:
        key = (run.first, self._profile_key(device), bits, phase)
        if key not in self._seconds:
            layers = [self.request.model.layers[index] for index in self._unit(run)]
            rates = Rates(device.profile, self.request.compute_type, self.request.kv_bits)
            load = (prefill_phase if phase[0] == "prefill" else decode_phase)(self.request.workload, phase[1])
            self._seconds[key] = sum(layer_seconds(each, DEFAULT_FORMAT_OF_BITS[bits], rates, load) for each in layers)
        return self._seconds[key]

    def _profile_key(self, device: Accelerator) -> bytes:
        name = (device.node, device.type, device.index)
        if name not in self._profiles:
            self._profiles[name] = msgspec.json.encode(device.profile, order="sorted")
        return self._profiles[name]

    def _transfer(self, candidate: Candidate, place: int) -> tuple[float, float]:
        """To the next stage; from the last one the sampled tokens go back to the first."""
        order = candidate.order
        if len(order) == 1:
            return 0.0, 0.0
        link = self.request.cluster.link(order[place], order[(place + 1) % len(order)])
        sizes = (candidate.prefill * self.request.workload.prompt_tokens, candidate.decode)
        if place == len(order) - 1:
            return sampled_tokens_seconds(link, candidate.prefill), sampled_tokens_seconds(link, candidate.decode)
        model, compute_type = self.request.model, self.request.compute_type
        return (
            hidden_states_seconds(model, link, sizes[0], compute_type),
            hidden_states_seconds(model, link, sizes[1], compute_type),
        )
