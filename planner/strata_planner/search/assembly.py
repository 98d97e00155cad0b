"""From a solved candidate to the Plan: layers and bits of each stage, KV budgets, predicted memory and times.

Called by `planning`. Every number of a stage comes from the same functions that the search used.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from strata_planner.contract.plan import (
    PLAN_VERSION,
    DeviceRef,
    MicroBatch,
    Plan,
    Prediction,
    Replica,
    Stage,
    StageMemory,
    StageTimes,
)
from strata_planner.contract.shares import lowest
from strata_planner.contract.values import ContractError
from strata_planner.costs.memory import (
    PAGE_TOKENS,
    kv_bytes_per_token,
    layer_weights_bytes,
    state_bytes_per_sequence,
)
from strata_planner.costs.shards import equal_shares, portion_of, portion_on
from strata_planner.naming import slot_name
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.problem import Problem
from strata_planner.search.exact.search import Found
from strata_planner.search.prediction import least_prompt_tokens, predict, steps_of


def combined(plans: Sequence[Plan], numbers: Sequence[int] = ()) -> Plan:
    """One plan of several of one replica each, planned alone for its share of the load, in the order of their numbers: 0, 1, ... where none are given.

    Raises ContractError for unlike plans.
    """
    first = plans[0]
    shared = {(each.model_uri, each.compute_type, each.max_model_len, each.page_tokens) for each in plans}
    if len(shared) > 1:
        raise ContractError("replicas of one deployment share model, compute type, length and page size; these do not")
    numbered = sorted(zip(numbers or range(len(plans)), plans, strict=True), key=lambda each: each[0])
    replicas = tuple(msgspec.structs.replace(plan.replicas[0], replica=number) for number, plan in numbered)
    shares = [replica.concurrency for replica in replicas]
    prediction = together([plan.prediction for _, plan in numbered], shares, [number for number, _ in numbered])
    return msgspec.structs.replace(first, replicas=replicas, prediction=prediction, alternatives=())


def together(predicted: Sequence[Prediction], shares: Sequence[int], numbers: Sequence[int] = ()) -> Prediction:
    """Of replicas with so many sequences in flight each. Rates add up; what a request sees is the mean, weighed by the shares."""
    numbers = numbers or range(len(predicted))

    def mean(values: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True)) / sum(shares)

    slowest = max(range(len(predicted)), key=lambda number: predicted[number].latency_seconds)
    increases = [each.perplexity_increase for each in predicted]
    where = f"replica {numbers[slowest]}: " if len(predicted) > 1 else ""
    return msgspec.structs.replace(
        predicted[0],
        tokens_per_second=sum(each.tokens_per_second for each in predicted),
        ttft_ms=mean([each.ttft_ms for each in predicted]),
        tpot_ms=mean([each.tpot_ms for each in predicted]),
        latency_seconds=predicted[slowest].latency_seconds,
        quality_penalty=mean([each.quality_penalty for each in predicted]),
        bound_by=f"{where}{predicted[slowest].bound_by}",
        perplexity_increase=None if None in increases else mean([each for each in increases if each is not None]),
    )


@dataclass(frozen=True)
class _Slice:
    """The layers of one stage: their global numbers and the bits of each."""

    stage: int
    layers: range
    bits: tuple[int, ...]


def assemble(
    request: PlanRequest, found: Found, pricer: Pricer, stage_bits: Sequence[tuple[int, ...]] | None = None
) -> Plan:
    """`stage_bits`: bits of each layer of every stage, where the caller says which of several equal layers get which."""
    slices = _slices(found, pricer) if stage_bits is None else _dealt(stage_bits)
    pages = _page_budget(request, found, pricer, slices)
    memories = _memories(request, found, pricer, slices, pages)
    steps = steps_of(pricer, found)
    stages = tuple(_stage(found, pricer, steps, part, pages, each) for part, each in zip(slices, memories, strict=True))
    micro_batch = MicroBatch(
        prefill=found.candidate.prefill,
        decode=found.candidate.decode,
        max_step_tokens=pricer.pricing.max_step_tokens(found.candidate.pair),
        count=found.candidate.pair.count,
        prompts_per_token=request.workload.prompt_tokens / request.workload.output_tokens,
        least_prompt_tokens=least_prompt_tokens(pricer, found, steps),
    )
    return Plan(
        version=PLAN_VERSION,
        model_uri=request.model_uri,
        architecture=request.model.architecture,
        num_layers=request.model.num_layers,
        compute_type=request.compute_type,
        max_model_len=request.max_model_len,
        page_tokens=PAGE_TOKENS,
        replicas=(Replica(0, stages, micro_batch, request.workload.concurrency),),
        prediction=predict(pricer, found),
        prefix_caching=request.served_prefix_caching,
        boundary_log_pages=request.boundary_log_pages,
        speculation=request.served_speculation,
        head_format=request.model.head_format,
    )


def _slices(found: Found, pricer: Pricer) -> list[_Slice]:
    """Layers in order. Units of one run on one stage are interchangeable: the finest come first."""
    slices, first = [], 0
    for j in range(len(found.candidate.order)):
        bits: list[int] = []
        for r, run in enumerate(pricer.layer_runs):
            mine = sorted(
                ((b, count) for (at, stage, b), count in found.solution.counts.items() if (at, stage) == (r, j)),
                reverse=True,
            )
            bits += [b for b, count in mine for _ in range(count * run.layers_per_unit)]
        slices.append(_Slice(j, range(first, first + len(bits)), tuple(bits)))
        first += len(bits)
    return slices


def _dealt(stage_bits: Sequence[tuple[int, ...]]) -> list[_Slice]:
    ends = list(accumulate((len(bits) for bits in stage_bits), initial=0))
    return [_Slice(j, range(ends[j], ends[j + 1]), bits) for j, bits in enumerate(stage_bits)]


def _memories(
    request: PlanRequest, found: Found, pricer: Pricer, slices: list[_Slice], pages: int
) -> list[tuple[StageMemory, ...]]:
    """Predicted bytes of every stage with `pages` pages of KV; of each of its devices where they are unlike."""
    order = found.candidate.order
    return [
        tuple(_memory(request, found, pricer, part, each, pages) for each in group.ranks)
        for group, part in zip(order, slices, strict=True)
    ]


def _memory(
    request: PlanRequest, found: Found, pricer: Pricer, part: _Slice, group: DeviceGroup, pages: int
) -> StageMemory:
    """Of the device that the group looks at."""
    first, head = part.stage == 0, part.stage == len(found.candidate.order) - 1
    rank = pricer.rank(group)
    formats = [pricer.formats(group)[bits] for bits in part.bits]
    weights = sum(
        layer_weights_bytes(
            portion_of(request.model.layers[index], rank.portion),
            name,
            request.compute_type,
            request.served_speculation,
        )
        for index, name in zip(part.layers, formats, strict=True)
    )
    tables = rank.table_bytes(embedding=first, head=head)
    kv = (
        pages * _page_bytes(request, part, group) + request.log_bytes(group, pages) + _state_bytes(request, part, group)
    )
    working = rank.working(found.candidate.pair, formats, head=head).peak(kv)
    draft = rank.draft_bytes(found.candidate.pair, first=first, head=head)
    total = weights + tables + kv + working + draft
    return StageMemory(weights, tables, kv, working, group.own.overhead_bytes, total, draft)


def _page_bytes(request: PlanRequest, part: _Slice, group: DeviceGroup) -> int:
    """Of all its layers; of the stage that leads, of the small model's too."""
    layers = (portion_of(request.model.layers[index], portion_on(group)) for index in part.layers)
    own = PAGE_TOKENS * sum(kv_bytes_per_token(each, request.kv_bits, request.compute_type) for each in layers)
    return own + (0 if part.stage else request.draft_page_bytes)


def _state_bytes(request: PlanRequest, part: _Slice, group: DeviceGroup) -> int:
    """Of all sequences that run at once."""
    layers = (portion_of(request.model.layers[index], portion_on(group)) for index in part.layers)
    return request.workload.concurrency * sum(state_bytes_per_sequence(each, request.compute_type) for each in layers)


def _page_budget(request: PlanRequest, found: Found, pricer: Pricer, slices: list[_Slice]) -> int:
    """Pages of every stage: what the workload needs, and what the stage with least room left can add to it, up to the whole
    batch at `max_model_len`. The leader admits by the smallest stage, so more pages elsewhere would lie idle.
    """
    least = _memories(request, found, pricer, slices, request.kv_pages)
    most = request.largest_kv_pages
    for group, memories, part in zip(found.candidate.order, least, slices, strict=True):
        for each, memory in zip(group.ranks, memories, strict=True):
            spare = each.usable_bytes - memory.total_bytes
            assert spare >= 0, "the solver keeps every stage within its memory"
            most = min(most, request.kv_pages + _more_pages(request, part, each, spare))
    return most


def _more_pages(request: PlanRequest, part: _Slice, group: DeviceGroup, spare: int) -> int:
    """That fit into `spare` bytes beside those that are needed."""
    page, few, most = _page_bytes(request, part, group), request.kv_pages, request.largest_kv_pages
    logged = request.log_bytes(group, few)

    def takes(pages: int) -> int:
        return (pages - few) * page + request.log_bytes(group, pages) - logged

    return bisect_right(range(few, most + 1), spare, key=takes) - 1


def _stage(
    found: Found, pricer: Pricer, steps: Problem, part: _Slice, pages: int, memories: tuple[StageMemory, ...]
) -> Stage:
    """`steps`: the candidate's, with the phases of a pipeline that is never empty."""
    place, request = part.stage, pricer.request
    group = found.candidate.order[place]
    shares = lowest(group.shares) or (group.shares and equal_shares(request.model, group.degree))
    prompts, decode = steps.stage_seconds(found.solution.counts, place)
    send_prompts, send = steps.stages[place].transfer_seconds
    sources = pricer.sources(part.bits, found.candidate, place)
    return Stage(
        stage=place,
        slot=slot_name(request.deployment, group.node, group.leader.type),
        node=group.node,
        devices=_devices(group),
        tensor_parallel=group.degree,
        leader=place == 0,
        layers=(part.layers[0], part.layers[-1]),
        bits=part.bits,
        format=tuple(pricer.formats(group)[bits] for bits in part.bits),
        kv_bits=request.kv_bits,
        kv_page_budget=pages,
        embedding=place == 0,
        head=place == len(found.candidate.order) - 1,
        memory=memories[0],
        times=StageTimes(prompts + decode, decode, send_prompts + send, send, sources),
        shares=shares,
        rank_memory=memories if shares else (),
    )


def _devices(group: DeviceGroup) -> tuple[DeviceRef, ...]:
    """Their threads are told where they have unlike ones: else those of their slot are."""
    alike = len({each.profile.threads for each in group.devices}) == 1
    return tuple(
        DeviceRef(each.type, each.index, each.usable_bytes, 0 if alike else each.profile.threads)
        for each in group.devices
    )
