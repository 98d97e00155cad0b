"""Replanning: near the best, little moved, nothing for noise, every step within memory."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from strata_planner.contract.plan import Plan
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.errors import InfeasibleError, WorkloadError
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.decision import Replanned, ReplanWishes, replan
from strata_planner.replan.holdings import Movement, Place, holdings, movement
from strata_planner.replan.running import keeps_to
from strata_planner.replan.steps import Drop, Ledger, Load, Narrow, Step, Switch
from strata_planner.search.metric import gain
from strata_planner.search.planning import make_plan
from tests.laws import share, swept
from tests.planner.builders import a_cluster, a_request

laws = settings(
    max_examples=share(8, 8),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # plans are searched for each example
)


def without(request: PlanRequest, name: str) -> PlanRequest:
    return replace(request, cluster=request.cluster.without({name}))


@st.composite
def losses(draw: st.DrawFn) -> tuple[Plan, PlanRequest]:
    """A plan on three or four devices, and the same question without one of them."""
    memory = draw(st.lists(st.sampled_from([2.0, 3.0, 6.0]), min_size=3, max_size=4))
    speeds = tuple(draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in memory)
    request = a_request(a_cluster(*memory, speeds=speeds), theta=draw(st.sampled_from([0.0, 0.01, 1.0])))
    after = without(request, draw(st.sampled_from([node.name for node in request.cluster.nodes])))
    try:
        plan = make_plan(request).plan
        make_plan(after)
    except InfeasibleError:
        assume(condition=False)
    return plan, after


@laws
@given(losses())
def test_after_a_loss_the_plan_is_near_the_best_moves_no_more_than_planning_anew_and_stays_within_memory(
    loss: tuple[Plan, PlanRequest],
) -> None:
    running, request = loss
    outcome = replan(request, running, ReplanWishes(min_gain=0.0))
    outcome.plan.check()
    assert outcome.value >= outcome.scratch_value - 0.02 * abs(outcome.scratch_value) - 1e-9
    is_better = gain(outcome.value, outcome.scratch_value) > ReplanWishes().slack
    assert is_better or outcome.movement.loaded_bytes <= outcome.scratch_movement.loaded_bytes
    if not outcome.kept:
        assert outcome.movement == movement(holdings(running), outcome.plan, request.model)
    check_steps(running, request, outcome)


def check_steps(running: Plan, request: PlanRequest, outcome: Replanned) -> None:
    """They lead from what is held to the plan, and no device ever holds more than it can."""
    devices = {each.place for each in request.cluster.accelerators()}
    serving = all(set(stage.places) <= devices for stage in running.stages)
    held = replayed(running, outcome.plan, outcome.steps, request, serving=serving)
    for stage in outcome.plan.stages:
        wanted = dict(zip(range(stage.layers[0], stage.layers[1] + 1), stage.format, strict=True))
        assert {layer: name for layer, name in held[stage.places].items() if layer is not None} == wanted


def replayed(
    running: Plan, plan: Plan, steps: tuple[Step, ...], request: PlanRequest, *, serving: bool
) -> dict[Place, dict[int | None, str]]:
    """What devices hold after the steps; fails where a step goes beyond a device's memory."""
    held: dict[Place, dict[int | None, str]] = {
        place: dict(each.layers) | ({None: "dense"} if any(each.tables) else {})
        for place, each in holdings(running).items()
    }
    old = {stage.places: stage for stage in running.stages}
    new = {stage.places: stage for stage in plan.stages}
    paused = not serving
    for step in steps:
        if isinstance(step, Switch):
            paused = True  # the running plan's KV and temporaries are gone
            continue
        mine = held.setdefault(step.place, {})
        if isinstance(step, Drop):
            paused |= step.pauses
            for layer in step.layers:
                del mine[layer]
            if step.tables and step.place not in new:
                mine.pop(None, None)
        elif isinstance(step, Narrow):
            assert mine[step.layer] == "dense"
            mine[step.layer] = step.to
        else:
            mine[step.layer] = step.to
        if step.place in new and isinstance(step, Load):
            stage = new[step.place]
            ledger = Ledger(request.model, plan, stage)
            total = sum(
                layer_weights_bytes(request.model.layers[layer], name, request.compute_type)  # type: ignore[arg-type]
                for layer, name in mine.items()
                if layer is not None
            )
            if not paused and step.place in old:
                total += old[step.place].memory.kv_bytes
            assert total <= ledger.usable_bytes
    return held


def test_nothing_moves_when_nothing_changed() -> None:
    request = a_request(a_cluster(3, 3, 6))
    running = make_plan(request).plan
    outcome = replan(request, running)
    assert outcome.kept
    assert outcome.plan == running
    assert (outcome.steps, outcome.movement) == ((), Movement())
    assert "gains 0.0%" in outcome.reason


@pytest.mark.slow  # test_nothing_moves_when_nothing_changed is the same without noise
@pytest.mark.parametrize("noise", [0.97, 1.03])
def test_nothing_moves_for_noise(noise: float) -> None:
    running = make_plan(a_request(a_cluster(3, 3, 6))).plan
    noisy = a_request(a_cluster(3, 3, 6, speeds=(1.0, noise, 1.0)))
    assert replan(noisy, running).kept


def test_a_much_faster_new_device_is_worth_moving_for() -> None:
    running = make_plan(a_request(a_cluster(3, 3), theta=0.0)).plan
    outcome = replan(a_request(a_cluster(3, 3, 64, speeds=(1, 1, 50)), theta=0.0), running)
    assert not outcome.kept
    assert outcome.reason.startswith("gains ")
    assert [step for step in outcome.steps if isinstance(step, Switch)]


def test_a_budget_keeps_a_running_plan_that_still_fits() -> None:
    running = make_plan(a_request(a_cluster(3, 3), theta=0.0)).plan
    faster = a_request(a_cluster(3, 3, 64, speeds=(1, 1, 50)), theta=0.0)
    outcome = replan(faster, running, ReplanWishes(most_loaded_bytes=1000))
    assert outcome.kept
    assert "the budget is 1000" in outcome.reason


def test_memory_that_others_took_is_respected() -> None:
    running = make_plan(a_request(a_cluster(64, 64), allowed_bits=(16,), min_stages=2)).plan
    outcome = replan(a_request(a_cluster(64, 1.2), allowed_bits=(16,), min_stages=2), running)
    assert not outcome.kept
    for stage in outcome.plan.replicas[0].stages:
        assert stage.memory.total_bytes <= stage.devices[0].usable_bytes


def test_survivors_keep_the_layers_they_hold() -> None:
    request = a_request(a_cluster(3, 3, 3), min_stages=3, allowed_bits=(8,))
    running = make_plan(request).plan
    lost = running.replicas[0].stages[1].node
    outcome = replan(replace(without(request, lost), min_stages=2), running)
    first, last = outcome.plan.replicas[0].stages
    before = {stage.node: stage.layers for stage in running.replicas[0].stages}
    assert (first.node, last.node) == (running.replicas[0].stages[0].node, running.replicas[0].stages[2].node)
    assert first.layers[0] == before[first.node][0]
    assert last.layers[1] == before[last.node][1]
    assert outcome.movement.moved_layers == before[lost][1] - before[lost][0] + 1


FOUR = a_cluster(64, 64, 64, 64)
CHANGED: dict[str, dict[str, Any]] = {
    "fewer replicas": {"max_replicas": 1},
    "longer pipelines": {"min_stages": 2},
    "keys and values of 8 bits": {"kv_bits": 8},
    "one pipeline by LLM-PQ's objective": {"solver": "pipeline"},
    "other widths": {"allowed_bits": (4,)},
    "less in flight than replicas": {"workload": Workload(32, 16, 2)},
}


@pytest.mark.parametrize("name", swept(CHANGED, ["fewer replicas"]))
def test_a_running_plan_that_breaks_a_wish_is_replaced_by_one_that_keeps_it(name: str) -> None:
    request = a_request(FOUR, workload=Workload(32, 16, 16), allowed_bits=(8, 16))
    running = make_plan(request).plan
    assert len(running.replicas) == 4
    wished = replace(request, **CHANGED[name])
    outcome = replan(wished, running)
    assert not outcome.kept
    assert keeps_to(wished, outcome.plan)


@pytest.mark.slow
def test_replicas_that_are_whole_stay_and_no_more_than_wished_join_them() -> None:
    request = a_request(FOUR, workload=Workload(32, 16, 16), max_replicas=2, allowed_bits=(8, 16))
    running = make_plan(request).plan
    lost = running.replicas[0].stages[0].node
    larger = without(replace(request, cluster=a_cluster(*[64] * 6)), lost)
    outcome = replan(larger, running)
    assert len(outcome.plan.replicas) == 2
    places = {stage.places for stage in running.replicas[1].stages}
    assert places <= {stage.places for stage in outcome.plan.stages}


@pytest.mark.slow  # the law of losses is below
@pytest.mark.parametrize("goal", swept(["throughput", "latency"], ["latency"]))
def test_what_lost_replicas_carried_is_carried_by_those_that_stay(goal: str) -> None:
    objective = Objective(goal)  # type: ignore[arg-type]
    request = a_request(FOUR, workload=Workload(32, 16, 16), objective=objective, allowed_bits=(8, 16))
    running = make_plan(request).plan
    outcome = replan(replace(request, cluster=a_cluster(64)), running)
    anew = make_plan(replace(request, cluster=a_cluster(64))).plan
    carried, wished = (sum(replica.concurrency for replica in plan.replicas) for plan in (outcome.plan, anew))
    assert carried == wished > running.replicas[0].concurrency
    fewer = replace(request, workload=Workload(32, 16, 8))  # which the running plan carries as well as any
    assert replan(fewer, running).kept


def test_a_dear_device_is_left_for_a_cheap_one() -> None:
    def priced(*costs: float) -> Cluster:
        nodes = (
            msgspec.structs.replace(
                node, devices=tuple(msgspec.structs.replace(each, hourly_cost=cost) for each in node.devices)
            )
            for node, cost in zip(a_cluster(64, 64).nodes, costs, strict=False)
        )
        return msgspec.structs.replace(a_cluster(64, 64), nodes=tuple(nodes))

    request = a_request(priced(10.0), objective=Objective("cost"))
    running = make_plan(request).plan
    outcome = replan(replace(request, cluster=priced(10.0, 1.0)), running)
    assert not outcome.kept
    assert [stage.node for stage in outcome.plan.stages] == ["b"]


def test_wishes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"minGain 1.0"):
        ReplanWishes(min_gain=1.0)
    with pytest.raises(WorkloadError, match="slack"):
        ReplanWishes(slack=-0.1)


def test_what_fits_no_longer_is_said() -> None:
    request = a_request(a_cluster(2, 2), allowed_bits=(16,))
    running = make_plan(request).plan
    with pytest.raises(InfeasibleError):
        replan(without(request, "a"), running)


def test_a_plan_that_serves_goes_on_while_there_is_room_and_pauses_where_there_is_none() -> None:
    request = a_request(a_cluster(64, 64), allowed_bits=(16,), min_stages=2)
    running = make_plan(request).plan
    eight = replace(request, allowed_bits=(8,))
    roomy = replan(eight, running)
    assert not any(getattr(step, "pauses", False) for step in roomy.steps)
    narrow = [step for step in roomy.steps if isinstance(step, Narrow)]
    assert len(narrow) == 6  # 16-bit layers are quantized where they lie; nothing is read
    assert roomy.movement == Movement()
    back = replan(request, make_plan(replace(request, allowed_bits=(3,), cluster=a_cluster(1.6, 1.6))).plan)
    assert [type(step) for step in back.steps].count(Load) == 6
