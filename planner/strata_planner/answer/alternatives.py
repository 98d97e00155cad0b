"""What was not chosen, and why: the best plan under another number of stages, one precision, or a single device.

Called by `strata plan` and by the operator for a first plan; not in the path of recovery. Each alternative is a search of its
own over a smaller space, so that "rejected because" compares two best plans.
"""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from strata_planner.contract.plan import Alternative, Plan
from strata_planner.errors import InfeasibleError, PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.search.planning import PlanOutcome, make_plan

MOST = 3
_SECONDS = 2.0  # for each search: an alternative is an explanation, not a promise


def with_alternatives(request: PlanRequest, outcome: PlanOutcome) -> PlanOutcome:
    """The outcome whose plan names up to MOST alternatives, the nearest first, what does not fit last."""
    plan = outcome.plan
    found = [_compared(plan, summary, variant) for summary, variant in _variants(request, plan)]
    known = [each for each in found if each is not None]
    ranked = sorted(known, key=lambda each: (each.objective is None, each.objective or 0.0))
    kept = ranked[: MOST - 1] + [each for each in ranked[MOST - 1 :] if each.objective is None][:1]
    kept += [each for each in ranked[MOST - 1 :] if each not in kept][: MOST - len(kept)]
    return replace(outcome, plan=_with(plan, tuple(kept)))


def _with(plan: Plan, alternatives: tuple[Alternative, ...]) -> Plan:
    return msgspec.structs.replace(plan, alternatives=alternatives)


def _variants(request: PlanRequest, plan: Plan) -> Iterator[tuple[str, PlanRequest]]:
    if request.layout:
        yield "one pipeline of single devices", replace(request, layout=None)
        return
    stages = len(plan.replicas[0].stages)
    most = min(len(request.cluster.accelerators()), request.model.num_layers)
    for count in dict.fromkeys((stages - 1, stages + 1, 1)):
        if 1 <= count <= most and count != stages:
            name = "one device" if count == 1 else f"{count} stages"
            yield name, replace(request, min_stages=count, max_stages=count)
    used = {bits for stage in plan.replicas[0].stages for bits in stage.bits}
    for bits in request.bits:
        if used != {bits}:
            yield f"{bits} bits everywhere", replace(request, allowed_bits=(bits,))


def _compared(plan: Plan, summary: str, variant: PlanRequest) -> Alternative | None:
    """None where the search told nothing in its time, or found the same plan."""
    try:
        other = make_plan(replace(variant, time_limit_seconds=min(_SECONDS, variant.time_limit_seconds))).plan
    except InfeasibleError as error:
        return Alternative(summary, None, None, f"does not fit: {error.reasons[0]}")
    except PlannerError:
        return None
    theta = variant.theta
    return Alternative(summary, other.prediction, objective(other, theta), why(plan, other, theta))


def objective(plan: Plan, theta: float) -> float:
    """What the search minimises (LLM-PQ, arXiv 2403.01136, equation 4)."""
    return plan.prediction.latency_seconds + theta * plan.prediction.quality_penalty


def why(plan: Plan, other: Plan, theta: float) -> str:
    """In which of the two terms the other plan is worse, and what binds it there."""
    mine, theirs = plan.prediction, other.prediction
    slower = theirs.latency_seconds / mine.latency_seconds - 1
    quality = theta * (theirs.quality_penalty - mine.quality_penalty)
    parts = []
    if abs(slower) >= 0.0005:
        parts.append(f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}, bound by {theirs.bound_by}")
    if abs(quality) >= 0.0005 * mine.latency_seconds:
        worse = "worse" if quality > 0 else "better"
        parts.append(f"quality {worse} by what qualityWeight values at {abs(quality):.3g} s")
    return "; ".join(parts) or "as good; the first found was kept"
