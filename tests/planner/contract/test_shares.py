"""Shares of unlike devices: everything is dealt, in proportion, and what plans and roles tell of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.plan import Plan, Stage
from strata_planner.contract.roles import roles_of
from strata_planner.contract.shares import Shares, dealt, equal, lowest, part, vocabulary
from strata_planner.contract.values import ContractError
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_cluster, a_request

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple)


@given(count=st.integers(0, 500), shares=SHARES)
def test_all_is_dealt_in_proportion(count: int, shares: Shares) -> None:
    found = dealt(count, shares)
    assert sum(found) == count
    assert count < len(shares) or min(found) >= 1, "nobody has nothing while there is one for each"
    pairs = [(one, other) for one in range(len(shares)) for other in range(len(shares)) if shares[one] > shares[other]]
    assert all(found[one] >= found[other] for one, other in pairs), "a larger share is never less"
    if min(count * each / sum(shares) for each in shares) >= 1:
        assert all(abs(own - count * each / sum(shares)) < 1 for own, each in zip(found, shares, strict=True))
    assert found == dealt(count, lowest(shares) or equal(len(shares))), "proportions alone count"


@given(count=st.integers(0, 500), shares=SHARES)
def test_parts_lie_one_behind_the_other(count: int, shares: Shares) -> None:
    for told in (part, vocabulary):
        parts = [told(count, shares, rank) for rank in range(len(shares))]
        assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
        assert parts[-1][1] == count


@given(count=st.integers(0, 500), ranks=st.integers(1, 9))
def test_equal_shares_are_as_even_as_whole_things_go(count: int, ranks: int) -> None:
    assert dealt(count, equal(ranks)) == tuple(count // ranks + (rank < count % ranks) for rank in range(ranks))


def a_plan(**changes: object) -> Plan:
    """Of one stage."""
    plan = make_plan(a_request(a_cluster(64), solver="pipeline")).plan
    (replica,) = plan.replicas
    (stage,) = replica.stages
    two = structs.replace(stage, devices=stage.devices * 2, tensor_parallel=2)
    stages = (structs.replace(two, **changes),)
    return structs.replace(plan, replicas=(structs.replace(replica, stages=stages),))


def of_ranks(*sizes: int) -> dict[str, object]:
    memory = a_plan().stages[0].memory
    each = tuple(structs.replace(memory, total_bytes=size) for size in sizes)
    return {"memory": each[0], "rank_memory": each}


def test_a_plan_without_shares_says_nothing_of_them() -> None:
    """As earlier releases wrote and read it."""
    text = a_plan().encode()
    assert b"shares" not in text
    assert b"rank" not in text
    assert b"threads" not in text
    stage = Plan.decode(text).stages[0]
    assert stage.shares == ()
    assert stage.total_bytes == 2 * stage.memory.total_bytes


def test_shares_and_the_memory_of_each_device_come_to_the_role() -> None:
    plan = Plan.decode(a_plan(shares=(5, 3), **of_ranks(500, 300)).encode())
    stage: Stage = plan.stages[0]
    ((role,),) = roles_of(plan).values()
    assert role.shares == (5, 3)
    assert (role.predicted_bytes, role.rank_bytes) == (500, (500, 300))
    assert role.total_bytes == stage.total_bytes == 800
    usable = stage.devices[0].usable_bytes
    assert [role.room_of(rank) for rank in (0, 1)] == [(500, usable), (300, usable)]
    grown = role.grown(1, 30)
    assert grown.rank_bytes == (550, 330)
    assert grown.predicted_bytes == 550
    assert structs.replace(role, shares=(), rank_bytes=()).grown(1, 30).predicted_bytes == 530


def test_the_fullest_device_is_the_one_with_least_room_in_proportion() -> None:
    stage = a_plan(shares=(5, 3), **of_ranks(500, 300)).stages[0]
    large, small = (structs.replace(stage.devices[0], usable_bytes=size) for size in (1000, 400))
    memory, device = structs.replace(stage, devices=(large, small)).fullest
    assert (memory.total_bytes, device.usable_bytes) == (300, 400)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shares": (5, 3, 1)}, "shares 5:3:1 of 2 devices: one for each device"),
        ({"shares": (5, 0)}, "shares 5:0: each is a whole number above 0"),
        ({"shares": (-1, 2)}, "shares -1:2: each is a whole number above 0"),
        ({"shares": (5, 3), **of_ranks(500)}, "memory of 1 devices where 2 have unlike shares"),
        (of_ranks(500, 300), "memory of 2 devices where 2 have unlike shares"),
    ],
    ids=["too many", "none for one", "negative", "memory of one", "memory without shares"],
)
def test_shares_that_are_none_are_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ContractError, match=f"replica 0 stage 0: {said}.*plan again"):
        Plan.decode(a_plan(**changes).encode())
