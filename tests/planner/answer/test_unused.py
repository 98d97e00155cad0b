"""Why devices serve nothing: each is told of once, with a reason that holds."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.answer.explain import unused_lines
from strata_planner.answer.unused import with_unused
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import IDLE, make_plan
from tests.laws import share
from tests.planner.builders import CARD, MIB, a_cluster, a_profile, a_request

laws = settings(max_examples=share(8), deadline=None)
ONE = Workload(8, 8, 1)  # of which a second device is of little use
FAR = LinkRate(gbps=0.001, latency_ms=100)


def explained(request: PlanRequest) -> Plan:
    return with_unused(request, make_plan(request, quick=True)).plan


def priced(*costs: float) -> Cluster:
    devices = (Device(CARD, memory_bytes=64 * MIB, usable_fraction=1.0, overhead_bytes=0, hourly_cost=c) for c in costs)
    nodes = tuple(Node(name, (device,)) for name, device in zip("abcd", devices, strict=False))
    return Cluster(nodes, profiles={CARD: a_profile(type=CARD)})


WITHOUT_MEMORY = Cluster(
    (*a_cluster(64).nodes, Node("b", (Device("T4", memory_bytes=MIB),))), profiles={CARD: a_profile(type=CARD)}
)
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "too small": ({"cluster": a_cluster(64, 0.01)}, "too small for one layer with its KV, also at 3 bits"),
    "no memory": ({"cluster": WITHOUT_MEMORY}, "no memory is left beside what the framework takes of it"),
    "a limit of replicas": (
        {"cluster": a_cluster(64, 64), "max_replicas": 1, "max_stages": 1},
        "placement.maxReplicas 1: with it as a replica the plan would be ",
    ),
    "a limit of stages": (
        {"cluster": a_cluster(1.2, 1.2, 1.2, speeds=(1, 1, 9)), "max_stages": 2, "theta": 100.0},
        "placement.maxStages 2: with it as a stage more the plan would be ",
    ),
    "a hop too far": (
        {"cluster": a_cluster(64, 64, link=FAR), "workload": ONE},
        "bound by decode hop after stage 0",
    ),
    "no sequence for it": (
        {"cluster": a_cluster(64, 64, 64, speeds=(1, 1, 0.001)), "max_stages": 1, "workload": Workload(8, 8, 2)},
        "all 2 sequences in flight are better served without it",
    ),
    "not worth its price": (
        {"cluster": priced(1.0, 9.0), "objective": Objective("cost")},
        "costs more than it gives: with it as a ",
    ),
    "one pipeline": (
        {"cluster": a_cluster(64, 64, link=FAR), "solver": "pipeline"},
        "with it as a stage more the plan is ",
    ),
}


@pytest.mark.parametrize(("changes", "words"), REASONS.values(), ids=REASONS)
def test_a_device_is_idle_because(changes: dict[str, Any], words: str) -> None:
    (told,) = explained(a_request(**changes)).unused
    assert words in told.reason
    assert told.count == len(told.nodes) == 1


def test_equal_devices_are_told_of_once() -> None:
    plan = explained(a_request(a_cluster(64, *(0.01,) * 6)))
    (told,) = plan.unused
    assert (told.count, len(told.nodes)) == (6, 6)
    assert unused_lines(plan) == [f"unused: 6 x card on {', '.join(told.nodes[:4])} and 2 more: {told.reason}"]


@laws
@given(
    st.lists(st.sampled_from([0.01, 1.2, 3.0, 64.0]), min_size=2, max_size=5),
    st.sampled_from([None, 1, 2]),
    st.sampled_from(["throughput", "latency"]),
    st.sampled_from([LinkRate(), FAR]),
)
def test_every_device_serves_or_has_a_reason(memory: list[float], most: int | None, goal: Any, link: LinkRate) -> None:
    request = a_request(a_cluster(64, *memory, link=link), max_replicas=most, objective=Objective(goal))
    quick = make_plan(request, quick=True)
    outcome = with_unused(request, quick)
    plan = outcome.plan
    used = {stage.node for stage in plan.stages}
    told = [node for each in plan.unused for node in each.nodes]
    assert sorted([*used, *told]) == sorted(node.name for node in request.cluster.nodes)
    assert all(each.reason and each.count == len(each.nodes) for each in plan.unused)
    assert value_of_plan(request, plan) >= value_of_plan(request, quick.plan)
    assert Plan.decode(plan.encode()) == plan
    assert not any(note.endswith(IDLE) for note in outcome.notes)


def test_an_idle_device_that_would_help_makes_the_plan_better() -> None:
    request = a_request(a_cluster(64, 64))
    one = make_plan(replace(request, cluster=structs.replace(request.cluster, nodes=request.cluster.nodes[:1])))
    both = with_unused(request, one)
    assert value_of_plan(request, both.plan) > value_of_plan(request, one.plan)
    assert both.plan.unused == ()


def test_a_plan_that_is_exchanged_tells_of_its_own_proof() -> None:
    request = a_request(a_cluster(64, 64))
    alone = replace(request, cluster=structs.replace(request.cluster, nodes=request.cluster.nodes[:1]))
    unproven = make_plan(alone, proven=False)
    assert [note for note in unproven.notes if "proven" in note] == [
        "layers and bits and which devices form a replica are searched, not proven"
    ]
    assert [note for note in with_unused(request, unproven).notes if "proven" in note] == [
        "layers and bits are proven for each replica's devices; which devices form one is searched, not proven"
    ]
