"""Making a plan: the planner's front door, called by `strata plan`, `strata up` and the operator.

check the request -> search -> assemble the Plan, or say why nothing fits. Pure: no file, no network, no clock but the time
limit's.
"""

from dataclasses import dataclass

from strata_planner.assembly import assemble
from strata_planner.contract.plan import Plan
from strata_planner.errors import InfeasibleError, PlannerError
from strata_planner.request import PlanRequest
from strata_planner.solve.feasibility import reasons
from strata_planner.solve.problem import StopReason
from strata_planner.solve.search import Search, SearchStats

__all__ = ["PlanOutcome", "PlanRequest", "make_plan"]


@dataclass(frozen=True)
class PlanOutcome:
    """The plan, what finding it took, and what its reader should know (`notes`: assumptions it rests on)."""

    plan: Plan
    stats: SearchStats
    notes: tuple[str, ...]


def make_plan(request: PlanRequest) -> PlanOutcome:
    """Raises InputError for a wrong request and InfeasibleError, with reasons, where nothing fits."""
    request.check()
    search = Search(request)
    found, stats = search.run()
    if found is None and stats.stop is StopReason.PROVED:
        raise InfeasibleError(reasons(request))
    if found is None:
        raise PlannerError(
            f"no plan within {request.time_limit_seconds:g} s ({stats.orders} device orders looked at): raise "
            "planning.timeLimitSeconds, or lower placement.maxStages"
        )
    plan = assemble(request, found, search.pricer)
    return PlanOutcome(plan, stats, _notes(request, plan, search, stats))


def _notes(request: PlanRequest, plan: Plan, search: Search, stats: SearchStats) -> tuple[str, ...]:
    notes = []
    if request.sensitivity is None and len(request.bits) > 1:
        notes.append(f"sensitivity: {request.omega.source}")
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    assumed = sorted({stage.devices[0].type for stage in stages if "assumed" in stage.times.source})
    if assumed:
        notes.append(f"rates or efficiencies of {', '.join(assumed)} are assumed: measure them for a better prediction")
    groups = {run.layers_per_unit for run in search.pricer.layer_runs}
    if groups != {1}:
        notes.append(f"layers decided in groups of {max(groups)} (more than 30b parameters)")
    if stats.stop is not StopReason.PROVED:
        notes.append(f"the search ended at its {stats.stop.value}: a better plan may exist")
    left_out = sorted(set(request.allowed_bits) - set(request.bits))
    if left_out:
        notes.append(f"bits {left_out} left out: the fused experts of this model have no format below 16 bits")
    return tuple(notes)
