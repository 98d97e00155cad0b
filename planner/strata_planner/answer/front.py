"""What precision costs and brings: the plan beside the best plans of one bit-width each, and from which `qualityWeight` on each is best.

Called by `strata plan --front`. A plan of one width has the same penalty whatever its devices and the weight are, so that of two of
them the one of better quality is the better one from some weight on.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata_planner.answer.compared import Compared, Told, compared, tell_nobody, why_none, without_plan
from strata_planner.answer.explain import bits_summary
from strata_planner.contract.formats import FORMATS_OF_METHOD
from strata_planner.contract.plan import Plan
from strata_planner.errors import PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan

CHOSEN = "chosen"
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-9, 1e9
_PRECISION = 1e-3  # of the weight at which two plans are equally good


@dataclass(frozen=True)
class Width:
    """A plan of one bit-width, or (`bits` None) the one that was chosen. `remark`: why it was or is not to be had. `weights`: between
    which `qualityWeight`s it is the best of those of one width; None where it never is.
    """

    bits: int | None
    compared: Compared
    remark: str
    weights: tuple[float, float] | None

    def as_json(self) -> dict[str, Any]:
        last = None if self.weights is None or self.weights[1] == float("inf") else self.weights[1]
        known = None if self.weights is None else {"from": self.weights[0], "to": last}
        own = {
            "bits": self.bits,
            "chosen": self.bits is None,
            "remark": self.remark or None,
            "bestForQualityWeight": known,
        }
        return self.compared.as_json() | own


def front(request: PlanRequest, plan: Plan, told: Told = tell_nobody) -> tuple[Plan, list[Width]]:
    """The plan, or a better one of one width that may be had; and all widths, fewest bits first, with that plan last."""
    found: dict[int, Plan | str] = {}
    for bits in _widths(request):
        told(f"{bits} bits")
        found[bits] = _of_width(request, plan, bits)
    allowed = [other for other in found.values() if isinstance(other, Plan) and not _breaks(request, other)]
    best = max((plan, *allowed), key=lambda each: value_of_plan(request, each))
    base = value_of_plan(request, best)
    rows = [
        (
            bits,
            compared(f"{bits} bits", request, other, base)
            if isinstance(other, Plan)
            else without_plan(f"{bits} bits", other),
        )
        for bits, other in found.items()
    ]
    weights = _best_for(request, rows)
    used = bits_summary(tuple(bits for stage in best.stages for bits in stage.bits))
    widths = [Width(bits, each, _remark(request, each), weights.get(bits)) for bits, each in rows]
    remark = f"{CHOSEN}; the checkpoint is quantized already" if request.model.quantization else CHOSEN
    return best, [*widths, Width(None, compared(used, request, best, base), remark, None)]


def _widths(request: PlanRequest) -> Iterable[int]:
    """All that the method has formats for, allowed or not; of a quantized checkpoint none: its bits were chosen when it was made."""
    return [] if request.model.quantization else sorted(FORMATS_OF_METHOD[request.method])


def _of_width(request: PlanRequest, plan: Plan, bits: int) -> Plan | str:
    """Or why there is none. Without the bound on perplexity: what it would cost is told beside."""
    alone = replace(request, allowed_bits=(bits,), penalty_bound=None)
    try:
        found = [make_plan(alone, [plan], quick=True).plan]
    except PlannerError as error:
        return why_none(error)
    if {each for stage in plan.stages for each in stage.bits} == {bits}:
        found.append(plan)
    return max(found, key=lambda each: value_of_plan(request, each))


def _breaks(request: PlanRequest, plan: Plan) -> list[str]:
    """Wishes of `spec` that the plan does not keep to."""
    used = {bits for stage in plan.stages for bits in stage.bits}
    broken = [] if used <= set(request.bits) else ["not in precision.allowed"]
    bound = request.penalty_bound
    if bound is not None and plan.prediction.quality_penalty > bound * (1 + 1e-9):
        broken.append("beyond maxPerplexityIncrease")
    return broken


def _remark(request: PlanRequest, each: Compared) -> str:
    return each.reason if each.plan is None else ", ".join(_breaks(request, each.plan))


def _best_for(request: PlanRequest, rows: Sequence[tuple[int, Compared]]) -> dict[int, tuple[float, float]]:
    """Of each width that is best somewhere, from which weight to which: quality counts the more, the larger the weight is."""
    left = {bits: each.plan for bits, each in rows if each.plan is not None}
    if not left or request.objective.goal == "slo":
        return {}  # that goal asks for requests in time, whatever their bits
    found: list[tuple[float, int]] = []  # from which weight on, bits
    start = 0.0
    while left:
        best = max(left, key=lambda bits: (_valued(request, left[bits], start), -left[bits].prediction.quality_penalty))
        found.append((start, best))
        plan = left.pop(best)
        left = {
            bits: other
            for bits, other in left.items()
            if other.prediction.quality_penalty < plan.prediction.quality_penalty
            and _valued(request, other, _MOST_WEIGHT) > _valued(request, plan, _MOST_WEIGHT)
        }
        start = min((_crossing(request, plan, other, start) for other in left.values()), default=0.0)
    ends = [*(weight for weight, _ in found[1:]), float("inf")]
    return {bits: (weight, end) for (weight, bits), end in zip(found, ends, strict=True)}


def _crossing(request: PlanRequest, plan: Plan, other: Plan, start: float) -> float:
    """The weight from which on the other plan, of better quality, is the better one. It is not yet at `start`."""
    low, high = max(start, _LEAST_WEIGHT), _MOST_WEIGHT
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        if _valued(request, other, middle) >= _valued(request, plan, middle):
            high = middle
        else:
            low = middle
    return high


def _valued(request: PlanRequest, plan: Plan, weight: float) -> float:
    return value_of_plan(replace(request, theta=weight), plan)
