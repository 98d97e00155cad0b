"""Replicas through a replanning: those that are the same in a new plan go on, whatever number a search gave them."""

from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from strata_operator.decide.epochs import CreateEpoch
from strata_planner.contract.plan import Plan, Replica
from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.replan.decision import ReplanWishes, replan
from strata_planner.replan.numbering import numbers_of
from strata_planner.replan.repair import repair
from strata_planner.search.planning import make_plan
from tests.laws import share, swept
from tests.operator.decide.test_epochs import World
from tests.operator.fakes import FakeSlot, addresses_of
from tests.planner.builders import a_cluster, a_request

laws = settings(
    max_examples=share(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # plans are searched for each example
)


class Fleet(World):
    """The slots of these plans, the first of which is served."""

    def __init__(self, served: Plan, wanted: Plan) -> None:
        super().__init__(served)
        names = sorted({stage.slot for plan in (served, wanted) for stage in plan.stages})
        self.slots = {name: FakeSlot(name) for name in names}
        self.up = set(names)
        self.addresses = addresses_of(*names)
        self.settle()
        self.desired = wanted

    def seen(self) -> Any:
        return replace(super().seen(), addresses=self.addresses)

    def settle(self) -> None:
        for _ in range(20):
            for slot in self.slots.values():
                slot.finish_loading()
            for step in self.steps():
                self.do(step)


def going_on(served: Plan, wanted: Plan) -> set[int]:
    """Numbers of the wanted plan's replicas that pass into its epoch as they are."""
    fleet = Fleet(served, wanted)
    fleet.up -= {stage.slot for stage in served.stages} - {stage.slot for stage in wanted.stages}
    (step,) = fleet.steps()
    assert isinstance(step, CreateEpoch)
    fleet.settle()
    assert fleet.ledger.newest is not None
    assert fleet.formed() == {each.replica: fleet.ledger.newest.formed_in(each.replica) for each in wanted.replicas}
    return {each.replica for each in step.formations}


def looks(replica: Replica) -> object:
    stages = [(each.devices, each.node, each.layers, each.format) for each in replica.stages]
    return msgspec.json.encode((stages, replica.micro_batch))


def alike(served: Plan, wanted: Plan) -> set[int]:
    """Of the wanted plan: with layers, bits, devices and micro-batches of a replica that serves, and no more sequences."""
    before = {looks(each): each.concurrency for each in served.replicas}
    return {each.replica for each in wanted.replicas if before.get(looks(each), 0) >= each.concurrency}


@st.composite
def changes(draw: st.DrawFn) -> tuple[Plan, PlanRequest]:
    """A layout on four to six devices, and its question when some have left or joined."""
    memory = draw(st.lists(st.sampled_from([2.0, 3.0, 6.0]), min_size=4, max_size=6))
    speeds = tuple(draw(st.sampled_from([1.0, 1.0, 4.0])) for _ in memory)
    request = a_request(
        a_cluster(*memory, speeds=speeds),
        solver="layout",
        workload=Workload(32, 16, 8),
        theta=draw(st.sampled_from([0.0, 0.01])),
        min_stages=draw(st.sampled_from([1, 2])),
        time_limit_seconds=0.5,
    )
    names = [node.name for node in request.cluster.nodes]
    lost = set(draw(st.lists(st.sampled_from(names), max_size=1)))
    more = draw(st.sampled_from([(), (6.0,)] if lost else [(6.0,)]))
    larger = a_cluster(*memory, *more, speeds=(*speeds, *(1.0 for _ in more)))
    left = replace(request, cluster=larger.without(lost), min_stages=1)
    try:
        plan = make_plan(request, quick=True).plan
        make_plan(left, quick=True)
    except InfeasibleError:
        assume(condition=False)
    return plan, left


@settings(laws, max_examples=share(20, 20))
@given(changes(), st.sampled_from([0.0, 0.1]))
def test_replicas_that_are_the_same_in_a_new_plan_go_on(change: tuple[Plan, PlanRequest], min_gain: float) -> None:
    served, request = change
    outcome = replan(request, served, ReplanWishes(min_gain=min_gain))
    assume(not outcome.kept and outcome.plan != served)
    numbers = [each.replica for each in outcome.plan.replicas]
    assert numbers == sorted(set(numbers))
    assert going_on(served, outcome.plan) >= alike(served, outcome.plan)


@cache
def two_and_two() -> tuple[PlanRequest, Plan]:
    """Four equal devices, two replicas of two stages each."""
    request = a_request(
        a_cluster(2, 2, 2, 2), solver="layout", workload=Workload(32, 16, 8), min_stages=2, allowed_bits=(16,)
    )
    plan = make_plan(request).plan
    assert [len(each.stages) for each in plan.replicas] == [2, 2]
    return request, plan


@pytest.mark.parametrize("number", swept([0, 1], [1]))
@pytest.mark.parametrize("stage", swept([0, 1], [0]))
def test_a_device_that_is_replaced_empties_no_other_replicas_kv(number: int, stage: int) -> None:
    request, served = two_and_two()
    lost = served.replicas[number].stages[stage].node
    larger = replace(request, cluster=a_cluster(2, 2, 2, 2, 2).without({lost}))
    outcome = replan(larger, served)
    assert len(outcome.plan.replicas) == 2
    assert going_on(served, outcome.plan) == {1 - number}


@pytest.mark.parametrize("number", [0, 1])
def test_a_replica_lost_for_good_leaves_the_other_its_number(number: int) -> None:
    request, served = two_and_two()
    gone = {stage.node for stage in served.replicas[number].stages}
    left = replace(request, cluster=request.cluster.without(gone))
    mended = repair(left, served)
    assert going_on(served, mended.plan) == {1 - number}
    fewer = replace(left, workload=Workload(32, 16, 4))
    outcome = replan(fewer, served)
    assert [each.replica for each in outcome.plan.replicas] == [1 - number]
    assert f"replica {number}" not in outcome.plan.prediction.bound_by


@laws
@given(st.data())
def test_numbers_follow_what_stays_and_are_given_once(data: st.DataObject) -> None:
    running = four_alone().replicas
    kept = data.draw(st.permutations(running).map(lambda each: each[: data.draw(st.integers(0, len(running)))]))
    others = [msgspec.structs.replace(each, stages=(strange(each),)) for each in running if each not in kept]
    new = data.draw(st.permutations([*kept, *others[: data.draw(st.integers(0, 2))]]))
    renumbered = [msgspec.structs.replace(each, replica=at) for at, each in enumerate(new)]
    numbers = numbers_of(renumbered, running)
    assert len(set(numbers)) == len(new)
    for number, replica in zip(numbers, new, strict=True):
        if replica in kept:
            assert number == replica.replica


def strange(replica: Replica) -> Any:
    """Its stage on another device, or at other bits."""
    stage = replica.stages[0]
    if replica.replica % 2:
        return msgspec.structs.replace(stage, node=f"{stage.node}-new")
    return msgspec.structs.replace(stage, bits=(3,) * len(stage.bits), format=("int3",) * len(stage.bits))


@cache
def four_alone() -> Plan:
    plan = make_plan(a_request(a_cluster(64, 64, 64, 64), workload=Workload(32, 16, 16), allowed_bits=(8, 16))).plan
    assert len(plan.replicas) == 4
    return plan


@cache
def of_long_texts() -> tuple[PlanRequest, Plan]:
    request = a_request(
        a_cluster(6, 6, 6, 6), solver="layout", workload=Workload(32, 16, 8), min_stages=2, max_model_len=768
    )
    return request, make_plan(request).plan


@pytest.mark.parametrize("case", swept([(90, True), (48, True), (47, False)], [(47, False)]), ids=str)
def test_a_few_more_pages_are_not_worth_another_formation(case: tuple[int, bool]) -> None:
    """Than the 48 that one sequence of full length needs: searched among more widths there was less room, for their kernels."""
    pages, stays = case
    request, found = of_long_texts()
    replicas = (
        msgspec.structs.replace(
            each, stages=tuple(msgspec.structs.replace(stage, kv_page_budget=pages) for stage in each.stages)
        )
        for each in found.replicas
    )
    served = msgspec.structs.replace(found, replicas=tuple(replicas))
    lost = served.replicas[0].stages[0].node
    outcome = replan(replace(request, cluster=a_cluster(6, 6, 6, 6, 6).without({lost})), served)
    assert (1 in going_on(served, outcome.plan)) == stays
    assert (outcome.plan.replicas[1] == served.replicas[1]) == stays


def test_more_sequences_than_there_are_pages_for_are_worth_another_formation() -> None:
    request, served = two_and_two()
    outcome = replan(replace(request, workload=Workload(32, 16, 16)), served, ReplanWishes(min_gain=0.0))
    for replica in outcome.plan.replicas:
        assert min(stage.kv_page_budget for stage in replica.stages) >= 3 * replica.concurrency


def test_a_stage_of_several_devices_keeps_its_strategies() -> None:
    devices = (Device("cpu", count=2, memory_bytes=1 << 30, threads=1),)
    nodes = tuple(Node(name, devices) for name in "abc")
    cluster = Cluster(nodes, default_link=LinkRate(gbps=10), intra_node=LinkRate(gbps=1, latency_ms=0.01))
    asked = {"tensor_parallel": (2,), "max_model_len": 1024, "allowed_bits": (16,), "workload": Workload(32, 16, 8)}
    request = a_request(cluster.without({"c"}), solver="layout", **asked)
    served = make_plan(request).plan
    assert [stage.tensor_parallel for stage in served.stages] == [2, 2]
    assert all(stage.strategies for stage in served.stages)
    lost = served.replicas[0].stages[0].node
    outcome = replan(replace(request, cluster=cluster.without({lost})), served)
    assert going_on(served, outcome.plan) == {1}
    assert all(stage.strategies for stage in outcome.plan.stages)
