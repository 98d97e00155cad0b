"""Making a plan: the planner's front door, called by `strata plan`, `strata up` and the operator.

check the request -> search -> assemble the Plan, or say why nothing fits. Pure: no file, no network, no clock but the time
limit's.
"""

from dataclasses import dataclass

from strata_planner.contract.plan import Plan
from strata_planner.costs.communication import RING_SHARE
from strata_planner.costs.source import Rates
from strata_planner.errors import InfeasibleError, PlannerError
from strata_planner.partition.seconds import Group
from strata_planner.partition.states import Collective
from strata_planner.partition.switching import strategy_table
from strata_planner.question.request import LayoutWishes, PlanRequest
from strata_planner.search.assembly import assemble
from strata_planner.search.exact.blocks import mixed_widths
from strata_planner.search.exact.feasibility import reasons
from strata_planner.search.exact.problem import SolutionStatus, StopReason
from strata_planner.search.exact.search import Search, SearchStats
from strata_planner.search.layouts.goals import Deadlines, Goal
from strata_planner.search.layouts.search import Wish, best_layout, layout_plan

__all__ = ["PlanOutcome", "PlanRequest", "make_plan"]

_PROVEN_GAP = 1e-5  # what is left between a plan and its bound when nothing better is to be found


@dataclass(frozen=True)
class PlanOutcome:
    """The plan, what finding it took, and what its reader should know (`notes`: assumptions it rests on)."""

    plan: Plan
    stats: SearchStats
    notes: tuple[str, ...]


def make_plan(request: PlanRequest) -> PlanOutcome:
    """Raises InputError for a wrong request and InfeasibleError, with reasons, where nothing fits."""
    request.check()
    return _layout(request, request.layout) if request.layout else _pipeline(request)


def _pipeline(request: PlanRequest) -> PlanOutcome:
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
    notes = _notes(request, plan)
    if search.narrower:
        notes.append(
            "memory is scarce for kernels of many widths: searched with each one and two widths alone, and with all in every stage"
        )
    groups = {run.layers_per_unit for run in search.pricer.layer_runs}
    if groups != {1}:
        notes.append(f"layers decided in groups of {max(groups)}: one by one they are too many for the solver")
    if stats.stop is not StopReason.PROVED or stats.gap > _PROVEN_GAP:
        ended = f"the search ended at its {stats.stop.value}: " if stats.stop is not StopReason.PROVED else ""
        notes.append(f"{ended}a better plan may exist, at most {stats.gap:.2%} better by the objective")
    return PlanOutcome(plan, stats, tuple(notes))


def _layout(request: PlanRequest, wishes: LayoutWishes) -> PlanOutcome:
    """Replicas and tensor-parallel groups: a search by chance with a seed, so that the same question has the same answer."""
    found = best_layout(request, Wish(_goal(wishes), request.time_limit_seconds))
    stats = SearchStats(
        orders=found.stats.evaluations,
        candidates=found.stats.mutations,
        pruned=0,
        solved=len(found.replicas),
        seconds=found.stats.seconds,
        stop=StopReason.TIME_LIMIT,
        status=SolutionStatus.FEASIBLE,
    )
    plan = layout_plan(request, found)
    notes = [*_notes(request, plan), *partition_notes(request, plan)]
    notes.append(
        "replicas by genetic search: layers and bits of each are proven for its devices, the dealing out is not"
    )
    if found.idle:
        notes.append(f"{found.idle} devices stay idle: they would not help this goal")
    return PlanOutcome(plan, stats, tuple(notes))


def _goal(wishes: LayoutWishes) -> Goal:
    if wishes.goal != "slo":
        return Goal(wishes.goal)
    assert wishes.deadline_seconds is not None, "the request is checked"
    assert wishes.requests_per_second is not None, "the request is checked"
    return Goal("slo", Deadlines((wishes.deadline_seconds,), (wishes.requests_per_second,)))


def partition_notes(request: PlanRequest, plan: Plan) -> list[str]:
    """How each tensor-parallel stage should cut its layers, by the tokens of a prefill step (DynPart)."""
    cluster, notes = request.cluster, dict[str, None]()
    for stage in (each for each in plan.stages if each.tensor_parallel > 1):
        devices = cluster.group(stage.places)
        assert devices is not None, "the plan was made for this cluster"
        first = devices.leader
        rates = Rates(first.profile, plan.compute_type, stage.kv_bits, first.name)
        shares = dict.fromkeys(Collective, RING_SHARE)
        group = Group(rates, cluster.slowest_link(devices), stage.tensor_parallel, link_shares=shares)
        table = strategy_table(request.model, group, request.max_model_len)
        named = ", ".join(f"{name} from {tokens} tokens" for tokens, name in table)
        notes[f"tensor partition of {stage.tensor_parallel} x {first.type}: {named}; decoding is megatron"] = None
    return list(notes)


def _notes(request: PlanRequest, plan: Plan) -> list[str]:
    notes = []
    if request.sensitivity is None and len(request.bits) > 1:
        notes.append(f"sensitivity: {request.omega.source}")
    assumed = sorted({stage.devices[0].type for stage in plan.stages if "assumed" in stage.times.source})
    if assumed:
        notes.append(f"rates or efficiencies of {', '.join(assumed)} are assumed: measure them for a better prediction")
    mixed = mixed_widths(request.model.num_layers, len(request.bits))
    if mixed < len(request.bits) and request.solver == "auto":
        notes.append(f"proven among plans whose stages mix at most {mixed} neighbouring widths")
    left_out = [] if request.model.quantization else sorted(set(request.allowed_bits) - set(request.bits))
    if left_out:
        notes.append(f"bits {left_out} left out: the fused experts of this model have no format below 16 bits")
    return notes
