"""Which strategies a plan's stages of several devices run: measured where their ranks were timed (`strata profile --ranks`), else predicted.

Called once a plan is found; it changes no stage's devices or layers. Predictions on processors switch only for a gain that they can tell.
"""

from collections.abc import Iterable

from msgspec import structs

from strata_planner.contract.latencies import LatencyProfile, StrategyPoint
from strata_planner.contract.plan import Plan, Stage
from strata_planner.contract.strategies import MEGATRON_ONLY, SWITCHED_FORMATS, told, why_not_switched
from strata_planner.costs.communication import RING_SHARE
from strata_planner.costs.fitted import FittedLatency
from strata_planner.costs.source import Rates
from strata_planner.partition.measured import measured_table
from strata_planner.partition.seconds import Group
from strata_planner.partition.states import Collective
from strata_planner.partition.switching import strategy_table
from strata_planner.question.catalogue import CPU
from strata_planner.question.request import PlanRequest

# Of a predicted step's seconds: rooflines of processors tell no smaller difference.
LEAST_GAIN = 0.05


def with_strategies(request: PlanRequest, plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with the strategies of its stages, and what there is to say of them."""
    notes = dict[str, None]()
    replicas = []
    for replica in plan.replicas:
        stages = [_with_strategies(request, plan, stage, notes) for stage in replica.stages]
        replicas.append(structs.replace(replica, stages=tuple(stages)))
    return structs.replace(plan, replicas=tuple(replicas)), list(notes)


def _with_strategies(request: PlanRequest, plan: Plan, stage: Stage, notes: dict[str, None]) -> Stage:
    if stage.tensor_parallel == 1:
        return stage
    devices = request.cluster.group(stage.places, stage.shares)
    assert devices is not None, "the plan was made for this cluster"
    first = devices.leader
    rates = Rates(first.profile, plan.compute_type, stage.kv_bits, first.name)
    about = f"tensor partition of {devices}"
    if devices.shares:
        notes[f"{about}: megatron (what strategies gain is known of equal devices alone)"] = None
        return stage
    reason = why_not_switched(plan.architecture, stage.format, first.type)
    about = f"tensor partition of {stage.tensor_parallel} x {first.type}"
    points = [] if reason else list(_measured(request, rates, stage))
    if points:
        table, source = measured_table(points), "measured"
    else:
        on_cpu = first.name == CPU
        link = request.cluster.slowest_link(devices)
        shares = dict.fromkeys(Collective, RING_SHARE)
        group = Group(rates, link, stage.tensor_parallel, link_shares=shares, shares_memory=on_cpu)
        least = LEAST_GAIN if on_cpu else 0.0
        table, source = strategy_table(request.model, group, request.max_model_len, least_gain=least), "predicted"
    if reason:
        notes[f"{about}: megatron ({reason}); {source}, if it could: {told(table)}"] = None
        return stage
    notes[f"{about}: {told(table)} of a step; decoding is megatron ({source})"] = None
    return stage if table == MEGATRON_ONLY else structs.replace(stage, strategies=table)


def _measured(request: PlanRequest, rates: Rates, stage: Stage) -> Iterable[StrategyPoint]:
    """Of as many ranks, in a format of the stage."""
    for source in request.latency_sources:
        if not isinstance(source, FittedLatency) or not source.knows_device(rates):
            continue
        if all(source.knows_layer(layer) for layer in set(request.model.layers)):
            yield from _of_stage(source.profile, stage)


def _of_stage(profile: LatencyProfile, stage: Stage) -> Iterable[StrategyPoint]:
    wanted = max(SWITCHED_FORMATS, key=stage.format.count)
    return (each for each in profile.strategies if (each.ranks, each.format) == (stage.tensor_parallel, wanted))
