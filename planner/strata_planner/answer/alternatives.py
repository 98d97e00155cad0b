"""What was not chosen, and why: the best plan under another number of stages or replicas, one precision, or a single device.

Called by whoever plans for the first time or looks for a better plan, never in the path of recovery. Each alternative is a search of its
own over a smaller space, so that "rejected because" compares two best plans. One that is better after all becomes the plan.
"""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from strata_planner.contract.plan import Alternative, Plan
from strata_planner.errors import InfeasibleError, PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.search.metric import Metric, gain, value_of_plan
from strata_planner.search.planning import PlanOutcome, make_plan

MOST = 3
DENSE_BITS = 16
_SECONDS = 2.0  # for each search: an alternative is an explanation, not a promise
_SAME = 1e-6  # plans whose values are apart by less are equally good


def with_alternatives(request: PlanRequest, outcome: PlanOutcome) -> PlanOutcome:
    """The outcome whose plan names up to MOST alternatives, the nearest first, what does not fit last. None is better than the plan:
    what turns out to be is the plan, and what was chosen before is tried again beside it.
    """
    found = [(summary, _planned(variant)) for summary, variant in _variants(request, outcome.plan)]
    planned = [other for _, other in found if isinstance(other, PlanOutcome)]
    best = max(planned, key=lambda each: value_of_plan(request, each.plan), default=None)
    if best is not None and gain(value_of_plan(request, best.plan), value_of_plan(request, outcome.plan)) > _SAME:
        return with_alternatives(request, best)
    known = [_compared(request, outcome.plan, summary, other) for summary, other in found if other is not None]
    ranked = sorted(known, key=lambda each: (each.objective is None, -(each.objective or 0.0)))
    kept = ranked[: MOST - 1] + [each for each in ranked[MOST - 1 :] if each.objective is None][:1]
    kept += [each for each in ranked[MOST - 1 :] if each not in kept][: MOST - len(kept)]
    return replace(outcome, plan=msgspec.structs.replace(outcome.plan, alternatives=tuple(kept)))


def _variants(request: PlanRequest, plan: Plan) -> Iterator[tuple[str, PlanRequest]]:
    """Within the same constraints, each narrower in one way."""
    one = len(plan.replicas) == 1
    if not one:
        yield "one replica", replace(request, max_replicas=1)
    stages = len(plan.replicas[0].stages)
    most = min(len(request.cluster.accelerators()), request.model.num_layers, request.max_stages or stages + 1)
    for count in dict.fromkeys((stages - 1, stages + 1, 1)) if one else (1,):
        if max(1, request.min_stages) <= count <= most and count != stages:
            name = "one device" if count == 1 else f"{count} stages"
            yield (name if one else f"{name} a replica"), replace(request, min_stages=count, max_stages=count)
    groups = tuple(degree for degree in request.tensor_parallel if degree > 1)
    if any(stage.tensor_parallel > 1 for stage in plan.stages):
        if 1 in request.tensor_parallel:
            yield "one device a stage", replace(request, tensor_parallel=(1,))
    elif groups:
        yield f"{' or '.join(map(str, groups))} devices a stage", replace(request, tensor_parallel=groups)
    used = {bits for stage in plan.stages for bits in stage.bits}
    stored = request.model.quantization is not None  # what its layers hold may be planned whatever is allowed
    for bits in request.bits:
        if used != {bits} and not (stored and bits == DENSE_BITS):
            yield f"{bits} bits everywhere", replace(request, allowed_bits=(bits,))


def _planned(variant: PlanRequest) -> PlanOutcome | InfeasibleError | None:
    """None where the search told nothing in its time."""
    try:
        return make_plan(replace(variant, time_limit_seconds=min(_SECONDS, variant.time_limit_seconds)))
    except InfeasibleError as error:
        return error
    except PlannerError:
        return None


def _compared(request: PlanRequest, plan: Plan, summary: str, other: PlanOutcome | InfeasibleError) -> Alternative:
    if isinstance(other, InfeasibleError):
        return Alternative(summary, None, None, f"does not fit: {other.reasons[0]}")
    value = value_of_plan(request, other.plan)
    stated = Metric.for_request(request).stated(value)
    return Alternative(summary, other.plan.prediction, value, why(request, plan, other.plan), stated.value)


def why(request: PlanRequest, plan: Plan, other: Plan) -> str:
    """By how much the other plan is worse in the request's metric, what it costs in quality, and what binds it."""
    mine, theirs = plan.prediction, other.prediction
    value = value_of_plan(request, other)
    worse = -gain(value, value_of_plan(request, plan))
    quality = request.theta * (theirs.quality_penalty - mine.quality_penalty)
    parts = []
    if abs(worse) >= 0.0005:
        said = (
            Metric.for_request(request).said(value).partition(", ")[0]
        )  # what is to be known of the unit stands in the table
        parts.append(
            f"{worse:.1%} worse ({said}), bound by {theirs.bound_by}" if worse > 0 else f"{-worse:.1%} better ({said})"
        )
    if abs(quality) >= 0.0005 * mine.latency_seconds:
        parts.append(
            f"quality {'worse' if quality > 0 else 'better'} by what qualityWeight values at {abs(quality):.3g} s"
        )
    return "; ".join(parts) or "as good; the first found was kept"
