"""A running plan as the search knows plans: its replicas under today's costs, of those whose devices are all there.

Called by `decision`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from strata_planner.contract.plan import Plan, Replica, Stage
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import ONE_PIPELINE, PlanRequest
from strata_planner.replan.placement import Placement, Units
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.problem import Solution, SolutionStatus, StopReason
from strata_planner.search.layouts.goals import in_proportion
from strata_planner.search.layouts.solved import SolvedReplica
from strata_planner.search.layouts.stages import with_concurrency
from strata_planner.search.prediction import predict


def keeps_to(request: PlanRequest, plan: Plan) -> bool:
    """Whether a plan may answer this request at all: its model, its type of activations, its length, its shape and its formats."""
    model = request.model
    asked = (request.model_uri, request.compute_type, request.max_model_len, model.num_layers, model.head_format)
    most = request.max_stages or model.num_layers
    replicas = 1 if request.solver in ONE_PIPELINE else request.max_replicas or len(plan.replicas)
    return (
        asked == (plan.model_uri, plan.compute_type, plan.max_model_len, plan.num_layers, plan.head_format)
        and (request.served_prefix_caching, request.boundary_log_pages, request.served_speculation)
        == (plan.prefix_caching, plan.boundary_log_pages, plan.speculation)
        and len(plan.replicas) <= min(replicas, request.workload.concurrency)
        and all(request.min_stages <= len(replica.stages) <= most for replica in plan.replicas)
        and all(_keeps_to(request, stage) for stage in plan.stages)
    )


def _keeps_to(request: PlanRequest, stage: Stage) -> bool:
    return (
        stage.tensor_parallel in request.tensor_parallel
        and stage.kv_bits == request.kv_bits
        and all(name in request.formats.get(bits, ()) for bits, name in zip(stage.bits, stage.format, strict=True))
    )


def running_replicas(request: PlanRequest, running: Plan) -> tuple[SolvedReplica, ...]:
    """Those that are whole and still fit, priced for the load that is asked for; none of a plan that answers another request."""
    if not keeps_to(request, running):
        return ()
    found = (
        whole_replica(with_concurrency(request, share), replica)
        for replica, share in zip(running.replicas, _shares(request, running), strict=True)
    )
    return tuple(each for each in found if each is not None)


def _shares(request: PlanRequest, running: Plan) -> tuple[int, ...]:
    """Of the sequences in flight: all for one replica, in proportion where there are fewer than were planned for."""
    asked, planned = request.workload.concurrency, [replica.concurrency for replica in running.replicas]
    return (asked,) if len(planned) == 1 else in_proportion(planned, asked)


def whole_replica(share: PlanRequest, replica: Replica, *, grouped: bool = True) -> SolvedReplica | None:
    """Charged for the widths that it has. None where a device is gone or too small for it."""
    used = {bits for stage in replica.stages for bits in stage.bits}
    groups = [share.cluster.group(stage.places, stage.shares) for stage in replica.stages]
    order = tuple(each for each in groups if each is not None)
    if not used <= set(share.bits) or len(order) < len(groups):
        return None
    own = replace(share, allowed_bits=tuple(sorted(used)))
    return _priced(Pricer(own, grouped=grouped), order, replica)


def _priced(pricer: Pricer, order: tuple[DeviceGroup, ...], replica: Replica) -> SolvedReplica | None:
    own, batch = pricer.request, replica.micro_batch
    most = own.workload.concurrency
    chunk = batch.max_step_tokens - batch.decode
    candidate = Candidate(order, Pair(min(batch.prefill, most), min(batch.decode, most), chunk, batch.count))
    problem, units = pricer.problem(candidate), Units.of(pricer.layer_runs)
    placement = placement_on(units, [stage.bits for stage in replica.stages])
    if placement is None or not problem.is_feasible(counts := placement.counts(units)):
        return None
    solution = Solution(SolutionStatus.FEASIBLE, StopReason.SETTLED, counts, problem.objective(counts))
    found = Found(candidate, problem, solution)
    return SolvedReplica(own, found, predict(pricer, found))


def placement_on(units: Units, stage_bits: Sequence[Sequence[int]]) -> Placement | None:
    """`stage_bits`: of each layer of every stage. None where stages or bits part layers that the solver decides together."""
    bits = [each for stage in stage_bits for each in stage]
    edges = {0, *accumulate(map(len, stage_bits))}
    placed: list[tuple[int, ...]] = []
    for layers in units.layers:
        mine = {bits[layer] for layer in layers}
        if len(mine) > 1 or edges & set(layers[1:]):
            return None
        if layers[0] in edges:
            placed.append(())
        placed[-1] += (mine.pop(),)
    return Placement(tuple(placed))
