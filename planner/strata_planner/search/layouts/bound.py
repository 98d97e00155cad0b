"""Tokens a second that no layout of a cluster passes: the other side of a layout's gap. Called by `fleet` and, for what plans say, by `answer.bounded`.

A linear programme over stages instead of replicas. Of a replica that decodes b sequences in each of c micro-batches, a round of which takes T seconds,
let y_j be the share of the time that stage j is busy: with x_j layers of t_j(b) seconds a step, y_j = c x_j t_j(b) / T, at most 1. Its rate is
n / (n - 1) times c b / T tokens a second. As the layers x_j add up to L, that is the sum over the stages of

    y_j n b / ((n - 1) L t_j(b))

each of which depends on the stage's own devices and b alone. A step has, in the mean, b s / (n - 1) tokens of prompts of s tokens beside; where seconds
are convex in a step's tokens that is least when all steps carry equally much. No step has more than so many tokens of prompts, so that b is no more than
they keep coming. Devices are counted per kind, at most all of them busy. Little's law
ties the sequences: those that stages hold, the sum of y_j b, and those on their way to the next stage, together are no more than there are. A
stage that cannot hold the whole model has another, a hop of h seconds away: for each that it holds, h / (x_j t_j(b)) are on their way, x_j no
more than its memory takes. And all of them together have KV in every layer: no more than memory takes beside one copy of the weights.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import highspy  # noqa: F401  before pulp, whose own import of it would swallow a Ctrl-C that comes meanwhile
import pulp

from strata_planner.costs.shards import degrees_of
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import MAX_CHUNK_TOKENS, PlanRequest
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.priced_group import PricedGroup
from strata_planner.search.highs import optimise
from strata_planner.search.layouts.pool import DeviceClass, Pool
from strata_planner.search.layouts.stages import with_concurrency

_STEP = 1.04  # between neighbouring micro-batches; those between count as the larger and take as much as the smaller


@dataclass(frozen=True)
class _Share:
    """A stage's while it is busy: of `degree` devices of a kind, with a micro-batch of `beyond` sequences or more, for each of which there are
    `and_hopping` in all, with those on their way.
    """

    kind: int
    degree: int
    beyond: int
    tokens_per_second: float
    and_hopping: float = 1.0


def most_tokens_per_second(request: PlanRequest) -> float:
    """No layout of groups of equal devices has a higher predicted rate: nothing is counted of heads, of a step's own time, of what hops send, and of layers that do not come
    out even. Exact where a layer's seconds per sequence never rise with the sequences and a step's are convex in its tokens, as a roofline's; a
    processor's are so but for the rows that its steps are padded by.
    """
    shares, counts, sequences = _asked(request)
    return _most(shares, counts, sequences)


def most_tokens_for(request: PlanRequest) -> float:
    """Tokens of an hour for `hourlyCost` 1, of which no layout has more: the best stage's. Raises ValueError where a device has no price."""
    shares, _, _ = _asked(request)
    least: dict[int, float] = {}
    for kind, (each, _) in enumerate(_kinds(request).values()):
        costs = [
            device.hourly_cost or 0.0
            for one in Pool(request.cluster).classes
            for device in one.devices
            if one.kind == each.kind
        ]
        if min(costs) <= 0:
            raise ValueError(f"{each.devices[0].type} has no hourlyCost")
        least[kind] = min(costs)
    return max((each.tokens_per_second * 3600 / each.degree / least[each.kind] for each in shares), default=0.0)


def least_request_seconds(request: PlanRequest) -> float:
    """From its prompt to its last token, that no layout answers a request in less: each of its tokens goes through every layer, one after the other, and none is
    quicker than with one row on the quickest devices at the bits that are quickest. Prompts may go through many stages at once and count nothing more.
    """
    pricer = Pricer(with_concurrency(request, 1))
    groups = [group for each, _ in _kinds(request).values() for group in _groups(pricer, each)]
    stages = [pricer.stage(group, _spread(pricer, 1), first=False, head=False).seconds for group in groups]
    layers = sum(
        run.units * min((decode for stage in stages for _, decode in stage[r].values()), default=math.inf)
        for r, run in enumerate(pricer.layer_runs)
    )
    return request.workload.output_tokens * layers


def _groups(pricer: Pricer, each: DeviceClass) -> Iterator[DeviceGroup]:
    """Of these devices, one of each size that may be a stage."""
    for degree, shares in degrees_of(pricer.request.model, pricer.request.tensor_parallel).items():
        if degree <= len(each.devices):
            yield DeviceGroup(each.devices[:degree], shares)


def _kinds(request: PlanRequest) -> dict[tuple[int, int], tuple[DeviceClass, int]]:
    """One class of each kind and size, with how many devices there are of it."""
    kinds: dict[tuple[int, int], tuple[DeviceClass, int]] = {}
    for each in Pool(request.cluster).classes:
        key = (each.kind, len(each.devices))
        kinds[key] = (each, kinds.get(key, (each, 0))[1] + len(each.devices))
    return kinds


def _asked(request: PlanRequest) -> tuple[list[_Share], list[int], int]:
    """What stages bring, devices of each kind, and sequences in flight."""
    length = min(request.max_model_len, request.workload.held_tokens)
    pricer = Pricer(replace(with_concurrency(request, 1), max_model_len=length))
    kinds = _kinds(request)
    counts = [count for _, count in kinds.values()]
    classes = [each for each, _ in kinds.values()]
    memory = sum(count * each.devices[0].usable_bytes for each, count in kinds.values())
    sequences = min(request.workload.concurrency, _held(pricer, classes, memory))
    hop = _least_hop(request)
    shares = [share for kind, each in enumerate(classes) for share in _shares(pricer, each, kind, sequences, hop)]
    return shares, counts, sequences


def _held(pricer: Pricer, classes: Sequence[DeviceClass], memory: int) -> int:
    """Sequences whose KV so much memory takes beside the weights, each layer's at the fewest bits that any device has; at least 1."""
    stages = [
        pricer.stage(DeviceGroup(each.devices[:1]), _spread(pricer, 1), first=False, head=False) for each in classes
    ]
    weights = kv = 0
    for r, run in enumerate(pricer.layer_runs):
        sizes = [size for stage in stages for size in stage.weight_bytes[r].values()]
        weights += run.units * min(sizes, default=0)
        kv += run.units * min(
            (both - stage.weight_bytes[r][bits] for stage in stages for bits, both in stage.bytes[r].items()), default=0
        )
    return max(1, (memory - weights) // kv) if kv > 0 else sys.maxsize


def _least_hop(request: PlanRequest) -> float:
    """Seconds of latency that no hop between two devices is below; infinite where there is one device."""
    cluster, classes = request.cluster, Pool(request.cluster).classes
    pairs = [(each.devices[0], each.devices[1]) for each in classes if len(each.devices) > 1]
    pairs += permutations((each.devices[0] for each in classes), 2)
    return min((cluster.link(*pair).latency_seconds for pair in pairs), default=math.inf)


def _shares(pricer: Pricer, each: DeviceClass, kind: int, sequences: int, hop: float) -> Iterator[_Share]:
    """`pricer`: of one sequence in flight. `hop`: the least seconds to another stage."""
    model = pricer.request.model
    for group in _groups(pricer, each):
        one = pricer.stage(group, _spread(pricer, 1), first=False, head=False)
        for bits in pricer.request.bits:
            if any(bits not in runnable for runnable in one.seconds):
                continue
            kv = min(both[bits] - own[bits] for both, own in zip(one.bytes, one.weight_bytes, strict=True))
            layer = min(
                own[bits] / run.layers_per_unit for own, run in zip(one.weight_bytes, pricer.layer_runs, strict=True)
            )
            most_layers = group.usable_bytes // max(layer, 1)
            away = 0.0 if most_layers >= model.num_layers or math.isinf(hop) else hop / max(most_layers, 1)
            most = min(group.usable_bytes // max(kv, 1), sequences, _most_kept_coming(pricer))
            for low, high in _sizes(max(1, most)):
                steps = max(1, pricer.request.workload.output_tokens - 1) / high
                step = _layer_seconds(pricer.priced(group), _spread(pricer, high), bits)
                seconds, hopping = model.num_layers * step * steps, 1 + away / max(step, 1e-12)
                yield _Share(
                    kind, group.degree, max(1, low - 1), pricer.request.workload.output_tokens / seconds, hopping
                )


def _spread(pricer: Pricer, decoding: int) -> Pair:
    """So many sequences, and as much of prompts as keeps them coming."""
    load = pricer.request.workload
    tokens = decoding * load.prompt_tokens / max(1, load.output_tokens - 1)
    return Pair(max(1, math.ceil(tokens / load.prompt_tokens)), decoding, min(MAX_CHUNK_TOKENS, max(1, int(tokens))))


def _most_kept_coming(pricer: Pricer) -> int:
    """Sequences that decode in a step, in the mean, where prompts have at most so many tokens of it: more end than come."""
    load = pricer.request.workload
    return MAX_CHUNK_TOKENS * max(1, load.output_tokens - 1) // load.prompt_tokens


def _layer_seconds(group: PricedGroup, pair: Pair, bits: int) -> float:
    """Of the quickest layer in a step that decodes and carries prompts."""
    return min(sum(seconds[bits]) / len(unit.layers) for unit, seconds in group.units(pair).items())


def _sizes(most: int) -> list[tuple[int, int]]:
    """Micro-batches of 1 to `most` sequences in ranges, (smallest, largest) of each."""
    found, low = [], 1
    while low <= most:
        high = min(most, max(low, int(low * _STEP)))
        found.append((low, high))
        low = high + 1
    return found


def _most(shares: list[_Share], counts: list[int], sequences: int) -> float:
    """`counts`: devices of each kind."""
    model = pulp.LpProblem("bound", pulp.LpMaximize)
    stages = [model.add_variable(f"stages_{number}", 0) for number in range(len(shares))]
    pairs = list(zip(stages, shares, strict=True))
    model += pulp.LpAffineExpression([(each, share.tokens_per_second) for each, share in pairs]), "tokens_per_second"
    for kind, count in enumerate(counts):
        used = [(each, share.degree) for each, share in pairs if share.kind == kind]
        model += pulp.LpAffineExpression(used) <= count, f"devices_{kind}"
    held = [(each, share.beyond * share.and_hopping) for each, share in pairs]
    model += pulp.LpAffineExpression(held) <= sequences, "sequences"
    optimise(model)
    return float(model.objective.value() or 0.0)
