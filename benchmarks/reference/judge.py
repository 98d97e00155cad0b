"""The judge of plans: objective and memory of an assignment, added up layer by layer from the cost functions.

Called by tests and benchmarks. It shares no code with the searches: neither their tables nor their Problem. Objective: LLM-PQ
(arXiv 2403.01136, section 4.2, equation 4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from strata_planner.contract.plan import Plan
from strata_planner.costs.communication import (
    Exchange,
    hidden_states_bytes,
    hidden_states_seconds,
    layer_collectives,
    sampled_tokens_seconds,
)
from strata_planner.costs.latency import Latencies
from strata_planner.costs.memory import (
    PAGE_TOKENS,
    embedding_bytes,
    kv_bytes_per_token,
    layer_weights_bytes,
    state_bytes_per_sequence,
)
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Rates, decode_phase, prefill_phase
from strata_planner.costs.working import StepShape, Storage, working_memory
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.model import LayerShape
from strata_planner.question.precision import formats_on
from strata_planner.question.request import MAX_CHUNK_TOKENS, PlanRequest


@dataclass(frozen=True)
class Assignment:
    """Stages in order: their devices and the bits of each of their layers; sequences in a micro-batch of each phase. `step_tokens`: at
    most; None: a micro-batch of prompts, cut where it is long, and one that decodes.
    """

    order: tuple[DeviceGroup, ...]
    bits: tuple[tuple[int, ...], ...]
    prefill: int
    decode: int
    step_tokens: int | None = None


@dataclass(frozen=True)
class Verdict:
    """`free_bytes`: of each stage's devices; negative: it does not fit."""

    latency_seconds: float
    penalty: float
    objective: float
    free_bytes: tuple[int, ...]

    @property
    def fits(self) -> bool:
        return min(self.free_bytes) >= 0


def assignment_of(plan: Plan, request: PlanRequest) -> Assignment:
    """Of a plan with one replica, on the request's cluster."""
    replica = plan.replicas[0]
    order = tuple(group for stage in replica.stages if (group := request.cluster.group(stage.places, stage.shares)))
    assert len(order) == len(replica.stages), "the plan was made for this cluster"
    batch = replica.micro_batch
    bits = tuple(stage.bits for stage in replica.stages)
    return Assignment(order, bits, batch.prefill, batch.decode, batch.max_step_tokens)


def judge(request: PlanRequest, given: Assignment) -> Verdict:
    """Raises nothing: what does not fit has negative free bytes."""
    load = request.workload
    stages = [_stage_seconds(request, given, j) for j in range(len(given.order))]
    hops = list(_hops(request, given)) if len(given.order) > 1 else []
    rounds = load.output_tokens - 1
    micro_batches = (-(-load.concurrency // given.prefill), -(-load.concurrency // given.decode))
    slowest = [max(each[phase] for each in stages + hops) for phase in (0, 1)]
    total = [sum(each[phase] for each in stages + hops) for phase in (0, 1)]
    latency = (micro_batches[0] - 1) * slowest[0] + (micro_batches[1] - 1) * rounds * slowest[1]
    latency += total[0] + rounds * total[1]
    every = [bits for stage in given.bits for bits in stage]
    penalty = sum(request.omega.of(layer, bits) for layer, bits in enumerate(every))
    free = tuple(_free_bytes(request, given, j) for j in range(len(given.order)))
    return Verdict(latency, penalty, latency + request.theta * penalty, free)


def _layers(given: Assignment, j: int) -> Iterator[tuple[int, int]]:
    """Number and bits of each layer of stage j."""
    first = sum(len(bits) for bits in given.bits[:j])
    return enumerate(given.bits[j], first)


def _stage_seconds(request: PlanRequest, given: Assignment, j: int) -> tuple[float, float]:
    group, model = given.order[j], request.model
    latencies = Latencies(request.latency_sources)
    rates = Rates(group.profile, request.compute_type, request.kv_bits, group.leader.name)
    formats = formats_on(request, group)
    found = []
    for phase in (prefill_phase(request.workload, given.prefill), decode_phase(request.workload, given.decode)):
        seconds = latencies.step(model, rates, phase).seconds
        if j == len(given.order) - 1:
            seconds += latencies.head(model, rates, phase.sequences).seconds / group.degree
        for layer, bits in _layers(given, j):
            shape = sharded(model.layers[layer], group.degree)
            seconds += latencies.layer(shape, formats[bits], rates, phase).seconds
            if group.degree > 1:
                seconds += _collectives(request, group, phase.total_tokens)
        found.append(seconds)
    return found[0], found[1]


def _collectives(request: PlanRequest, group: DeviceGroup, tokens: int) -> float:
    links = [request.cluster.link(a, b) for a in group.devices for b in group.devices if a != b]
    slowest = min(links, key=lambda link: link.gbps)
    size = hidden_states_bytes(request.model, tokens, request.compute_type)
    exchange = Exchange(group.leader.name, group.degree, slowest, size)
    return layer_collectives(request.latency_sources, exchange).seconds


def _hops(request: PlanRequest, given: Assignment) -> Iterator[tuple[float, float]]:
    """From each stage to the next; from the last the tokens go back to the first."""
    prompt = given.prefill * request.workload.prompt_tokens
    for source, target in zip(given.order, given.order[1:], strict=False):
        link = request.cluster.link(source.leader, target.leader)
        yield (
            hidden_states_seconds(request.model, link, prompt, request.compute_type),
            hidden_states_seconds(request.model, link, given.decode, request.compute_type),
        )
    back = request.cluster.link(given.order[-1].leader, given.order[0].leader)
    yield sampled_tokens_seconds(back, given.prefill), sampled_tokens_seconds(back, given.decode)


def _free_bytes(request: PlanRequest, given: Assignment, j: int) -> int:
    group, model = given.order[j], request.model
    head = j == len(given.order) - 1
    weights = kv = 0
    format_of = formats_on(request, group)
    for layer, bits in _layers(given, j):
        shape = sharded(model.layers[layer], group.degree)
        weights += layer_weights_bytes(shape, format_of[bits], request.compute_type)
        kv += request.kv_pages * PAGE_TOKENS * kv_bytes_per_token(shape, request.kv_bits, request.compute_type)
        kv += request.workload.concurrency * state_bytes_per_sequence(shape, request.compute_type)
    tables = embedding_bytes(model, embedding=j == 0, head=head, compute_type=request.compute_type)
    prompts = min(given.prefill * request.workload.prompt_tokens, MAX_CHUNK_TOKENS)
    tokens = given.step_tokens or prompts + given.decode
    formats = frozenset(format_of[bits] for bits in given.bits[j])
    storage = Storage.on(group.leader, formats, request.compute_type, request.kv_bits)
    shards = msgspec.structs.replace(model, layers=_shards(model.layers, group.degree))
    working = working_memory(shards, StepShape(tokens, given.decode, request.max_model_len), storage, head=head)
    return group.usable_bytes - weights - kv - -(-tables // group.degree) - working.peak(kv)


def _shards(layers: Sequence[LayerShape], degree: int) -> tuple[LayerShape, ...]:
    return tuple(dict.fromkeys(sharded(layer, degree) for layer in layers))
