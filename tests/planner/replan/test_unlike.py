"""Groups of unlike devices when plans change: what has other shares is read anew, what stays stays, alike devices are exchanged kind by kind."""

from dataclasses import replace

import pytest
from msgspec import structs

from strata_planner.contract.plan import Plan
from strata_planner.contract.shares import Shares
from strata_planner.costs.memory import embedding_bytes
from strata_planner.question.cluster import Cluster, DeviceGroup, Node
from strata_planner.replan.decision import replan
from strata_planner.replan.holdings import Movement, holdings, movement
from strata_planner.replan.matching import closest
from strata_planner.replan.running import running_replicas
from strata_planner.replan.steps import Drop, Load, Switch, steps
from strata_planner.search.exact.orders import fleet_of
from strata_planner.search.planning import make_plan
from tests.planner.search.layouts.test_unlike import WIDE, a_card, asked, check_memory

REQUEST = asked(a_card(60, 2.0), a_card(70, 1.0), model=WIDE)
PLAN = make_plan(REQUEST).plan


def with_shares(shares: Shares) -> Plan:
    (replica,) = PLAN.replicas
    stages = tuple(structs.replace(stage, shares=shares) for stage in replica.stages)
    return structs.replace(PLAN, replicas=(structs.replace(replica, stages=stages),))


def test_a_running_group_is_priced_as_it_was_planned() -> None:
    assert PLAN.stages[0].shares == (2, 1)
    (replica,) = running_replicas(REQUEST, PLAN)
    assert replica.order[0].shares == (2, 1)
    assert replica.prediction.tokens_per_second == PLAN.prediction.tokens_per_second
    (slower,) = running_replicas(REQUEST, with_shares((5, 3)))
    assert slower.prediction.tokens_per_second < replica.prediction.tokens_per_second


def test_what_stays_is_not_read_and_parts_of_other_shares_are() -> None:
    before = holdings(PLAN)
    assert movement(before, PLAN, WIDE) == Movement()
    other = movement(before, with_shares((5, 3)), WIDE)
    assert other == movement({}, with_shares((5, 3)), WIDE)
    tables = embedding_bytes(WIDE, embedding=True, head=True, compute_type="bfloat16")
    linears = sum(2 * layer.linear_parameters for layer in WIDE.layers)
    assert tables + linears <= other.loaded_bytes < 1.02 * (tables + linears)  # norms are held by both


def test_steps_to_other_shares_free_the_parts_before_they_read_any() -> None:
    assert steps(PLAN, PLAN, WIDE, serving=True) == (Switch(),)
    found = steps(PLAN, with_shares((5, 3)), WIDE, serving=True)
    first, *loads, last = found
    assert first == Drop(PLAN.stages[0].places, tuple(range(6)), tables=True, pauses=True)
    assert last == Switch()
    assert all(isinstance(each, Load) for each in loads)
    assert len(loads) == 1 + 6


def test_devices_of_a_group_are_exchanged_for_those_of_their_kind() -> None:
    nodes = tuple(Node(name, (a_card(60, 2.0, count=2), a_card(70, 1.0, count=2))) for name in "ab")
    cluster = Cluster(nodes, profiles=REQUEST.cluster.profiles)
    fast, slow = (cluster.accelerators()[at] for at in (0, 2))
    order = (DeviceGroup((fast, slow), (2, 1)),)
    wanted = (("b", "card", 1), ("b", "card", 3))
    (named,) = closest(order, fleet_of(cluster), lambda _, group: float(group.places != wanted))
    assert named.places == wanted
    assert named.shares == (2, 1)


def test_a_group_that_lost_nothing_stays_to_the_last_byte() -> None:
    assert replan(REQUEST, PLAN).plan == PLAN


@pytest.mark.parametrize("left", [0, 1])
def test_a_group_that_lost_a_device_goes_on_with_what_is_left(left: int) -> None:
    rest = REQUEST.cluster.nodes[0].devices[left]
    request = replace(REQUEST, cluster=structs.replace(REQUEST.cluster, nodes=(Node("a", (rest,)),)))
    running = (
        with_devices({0: 7, 1: 8}) if left else PLAN
    )  # of two devices of one type the first has number 0, whichever it is
    found = replan(request, running).plan
    check_memory(found)
    assert {stage.tensor_parallel for stage in found.stages} == {1}


def with_devices(numbers: dict[int, int]) -> Plan:
    (replica,) = PLAN.replicas
    stages = tuple(
        structs.replace(
            stage, devices=tuple(structs.replace(device, index=numbers[device.index]) for device in stage.devices)
        )
        for stage in replica.stages
    )
    return structs.replace(PLAN, replicas=(structs.replace(replica, stages=stages),))
