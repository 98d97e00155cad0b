"""Tokens a second that no layout of a cluster passes: the other side of a layout's gap. Called by `fleet`.

A linear programme over stages instead of replicas. Of a replica with S stages, B sequences in flight and decode micro-batches of
xi = ceil(B / S), every stage j takes at least what a request needs of it: n - 1 steps shared by xi sequences, and its prompt of s
tokens. Where seconds are convex in a step's tokens that is least when all steps carry equally much of prompts:

    x_j w_j(xi) <= n / R    w = (n - 1) / xi x (a step with xi sequences and xi s / (n - 1) tokens of prompts), seconds of a layer

and over the stages, whose layers x_j add up to L, R <= sum_j n / (L w_j(xi)). Each stage's share of the
rate depends on its devices and xi alone. Devices are counted per kind; S (xi - 1) < B ties the micro-batches to the sequences in flight.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import highspy  # noqa: F401  before pulp, whose own import of it would swallow a Ctrl-C that comes meanwhile
import pulp

from strata_planner.costs.shards import divisible
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import MAX_CHUNK_TOKENS, PlanRequest
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.problem import StageCosts
from strata_planner.search.highs import optimise
from strata_planner.search.layouts.pipelines import DEGREES
from strata_planner.search.layouts.pool import DeviceClass, Pool
from strata_planner.search.layouts.stages import with_concurrency

_STEP = 1.04  # between neighbouring micro-batches; those between count as the larger and take as much as the smaller


@dataclass(frozen=True)
class _Share:
    """A stage's: of `degree` devices of a kind, with a micro-batch of more than `beyond` sequences."""

    kind: int
    degree: int
    beyond: int
    tokens_per_second: float


def most_tokens_per_second(request: PlanRequest) -> float:
    """No layout of groups of equal devices has a higher predicted rate (a fleet's nodes hold no others): nothing is counted of hops, heads, steps, idle stages, layers that do not come out
    even, and of memory only the KV of one layer. Exact where a layer's seconds per sequence never rise with the sequences and a step's are
    convex in its tokens, as a roofline's; a processor's are so but for the rows that its steps are padded by.
    """
    length = min(request.max_model_len, request.workload.held_tokens)
    pricer = Pricer(replace(with_concurrency(request, 1), max_model_len=length))
    kinds: dict[tuple[int, int], tuple[DeviceClass, int]] = {}
    for each in Pool(request.cluster).classes:
        key = (each.kind, len(each.devices))
        kinds[key] = (each, kinds.get(key, (each, 0))[1] + len(each.devices))
    counts = [count for _, count in kinds.values()]
    sequences = request.workload.concurrency
    shares = [
        share for kind, (each, _) in enumerate(kinds.values()) for share in _shares(pricer, each, kind, sequences)
    ]
    return _most(shares, counts, sequences)


def _shares(pricer: Pricer, each: DeviceClass, kind: int, sequences: int) -> Iterator[_Share]:
    """`pricer`: of one sequence in flight."""
    model = pricer.request.model
    for degree in DEGREES:
        if degree not in pricer.request.tensor_parallel or degree > len(each.devices) or not divisible(model, degree):
            continue
        group = DeviceGroup(each.devices[:degree])
        one = pricer.stage(group, _spread(pricer, 1), first=False, head=False)
        for bits in pricer.request.bits:
            if any(bits not in runnable for runnable in one.seconds):
                continue
            kv = min(both[bits] - own[bits] for both, own in zip(one.bytes, one.weight_bytes, strict=True))
            sizes = _sizes(max(1, min(group.usable_bytes // max(kv, 1), sequences)))
            for low, high in sizes:
                costs = pricer.stage(group, _spread(pricer, high), first=False, head=False)
                steps = max(1, pricer.request.workload.output_tokens - 1) / high
                seconds = model.num_layers * _layer_seconds(pricer, costs, bits) * steps
                yield _Share(kind, degree, low - 1, pricer.request.workload.output_tokens / seconds)


def _spread(pricer: Pricer, decoding: int) -> Pair:
    """So many sequences, and as much of prompts as keeps them coming."""
    load = pricer.request.workload
    tokens = decoding * load.prompt_tokens / max(1, load.output_tokens - 1)
    return Pair(max(1, math.ceil(tokens / load.prompt_tokens)), decoding, min(MAX_CHUNK_TOKENS, max(1, int(tokens))))


def _layer_seconds(pricer: Pricer, costs: StageCosts, bits: int) -> float:
    """Of the quickest layer in a step that decodes and carries prompts."""
    return min(
        (each[bits][0] + each[bits][1]) / run.layers_per_unit
        for run, each in zip(pricer.layer_runs, costs.seconds, strict=True)
    )


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
    model += pulp.LpAffineExpression([(each, share.beyond) for each, share in pairs]) <= sequences, "sequences"
    optimise(model)
    return float(model.objective.value() or 0.0)
