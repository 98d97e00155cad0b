"""A running plan as the search knows plans: its replicas under today's costs, of those whose devices are all there.

Called by `decision`.
"""

from collections.abc import Sequence
from dataclasses import replace

from strata_planner.contract.plan import Plan, Replica, Stage
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.replan.placement import Placement, Units
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.problem import Solution, SolutionStatus, StopReason
from strata_planner.search.layouts.solved import SolvedReplica
from strata_planner.search.layouts.stages import with_concurrency
from strata_planner.search.prediction import predict


def running_replicas(request: PlanRequest, running: Plan) -> tuple[SolvedReplica, ...]:
    """Those that are whole, still fit, and answer this request at all: its model, its type of activations, its length, its widths."""
    asked = (request.model_uri, request.compute_type, request.max_model_len, request.model.num_layers)
    if asked != (running.model_uri, running.compute_type, running.max_model_len, running.num_layers):
        return ()
    alone = len(running.replicas) == 1
    found = (
        _whole(request if alone else with_concurrency(request, replica.concurrency), replica)
        for replica in running.replicas
    )
    return tuple(each for each in found if each is not None)


def _whole(share: PlanRequest, replica: Replica) -> SolvedReplica | None:
    """Charged for the widths that it has."""
    used = {bits for stage in replica.stages for bits in stage.bits}
    groups = [share.cluster.group(stage.places) for stage in replica.stages]
    order = tuple(each for each in groups if each is not None)
    if not used <= set(share.bits) or len(order) < len(groups):
        return None
    own = replace(share, allowed_bits=tuple(sorted(used)))
    return _priced(own, order, replica)


def _priced(own: PlanRequest, order: tuple[DeviceGroup, ...], replica: Replica) -> SolvedReplica | None:
    pricer, batch = Pricer(own), replica.micro_batch
    candidate = Candidate(order, batch.prefill, batch.decode)
    problem, units = pricer.problem(candidate), Units.of(pricer.layer_runs)
    placement = _placement_of(units, replica.stages)
    if placement is None or not problem.is_feasible(counts := placement.counts(units)):
        return None
    solution = Solution(SolutionStatus.FEASIBLE, StopReason.SETTLED, counts, problem.objective(counts))
    found = Found(candidate, problem, solution)
    return SolvedReplica(own, found, predict(own, found))


def _placement_of(units: Units, stages: Sequence[Stage]) -> Placement | None:
    """None where stages or bits part layers that the solver decides together."""
    bits = [each for stage in stages for each in stage.bits]
    edges = {stage.layers[0] for stage in stages}
    placed: list[tuple[int, ...]] = []
    for layers in units.layers:
        mine = {bits[layer] for layer in layers}
        if len(mine) > 1 or edges & set(layers[1:]):
            return None
        if layers[0] in edges:
            placed.append(())
        placed[-1] += (mine.pop(),)
    return Placement(tuple(placed))
