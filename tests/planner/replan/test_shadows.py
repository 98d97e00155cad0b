"""Shadows: within host memory, never on the node that they are kept against, what the repair reads, and the same every time."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from strata_planner.contract.plan import Plan
from strata_planner.contract.shadows import Shadow, kept_bytes
from strata_planner.contract.values import ContractError
from strata_planner.errors import InfeasibleError, OutOfTimeError
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.request import PlanRequest
from strata_planner.replan.repair import Takeover, repair
from strata_planner.replan.shadow_room import Read, chosen, still_kept
from strata_planner.replan.shadows import with_shadows
from strata_planner.replan.steps import Load
from strata_planner.search.planning import make_plan
from tests.laws import share
from tests.planner.builders import MIB, a_cluster, a_profile, a_request

laws = settings(
    max_examples=share(24, 24),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # plans are searched for each example
)
PLENTY = 1 << 40


def with_one_stage_fewer(request: PlanRequest) -> PlanRequest:
    """As it is repaired: a plan of many stages for the sake of the test, that may lose one."""
    return replace(request, min_stages=1)


@st.composite
def plans(draw: st.DrawFn) -> tuple[PlanRequest, Plan, int]:
    """A plan on three to four nodes, and what each slot may keep."""
    memory = draw(st.lists(st.sampled_from([1.5, 2.0, 3.0, 6.0]), min_size=3, max_size=4))
    changes: dict[str, Any] = {
        "solver": draw(st.sampled_from(["pipeline", "layout"])),
        "method": draw(st.sampled_from(["roundToNearest", "anyPrecision"])),
        "min_stages": draw(st.sampled_from([1, 3])),
    }
    request = a_request(a_cluster(*memory), time_limit_seconds=0.5, **changes)
    try:
        plan = make_plan(request, quick=True).plan
    except (InfeasibleError, OutOfTimeError):
        assume(condition=False)
    return with_one_stage_fewer(request), plan, draw(st.sampled_from([100_000, 500_000, PLENTY]))


def planned(*memory: float, **changes: Any) -> tuple[PlanRequest, Plan]:
    request = a_request(a_cluster(*memory), time_limit_seconds=0.5, method="anyPrecision", **changes)
    return with_one_stage_fewer(request), make_plan(request, quick=True).plan


@laws
@given(plans())
def test_shadows_keep_to_memory_and_to_other_nodes_and_are_what_a_repair_reads(
    asked: tuple[PlanRequest, Plan, int],
) -> None:
    request, plan, most = asked
    found = with_shadows(request, plan, Takeover(), most)
    shadowed = found.plan
    assert msgspec.structs.replace(shadowed, shadows=()) == plan  # nothing else of it changes
    assert Plan.decode(shadowed.encode()) == shadowed
    assert with_shadows(request, plan, Takeover(), most) == found
    assert all(size <= most for size in kept_bytes(shadowed.shadows).values())
    for each in shadowed.shadows:
        assert each.against != each.node
        left = replace(request, cluster=request.cluster.without({each.against}))
        mended = repair(left, shadowed, Takeover())
        places = {stage.places for stage in plan.stages if stage.slot == each.slot}
        loads = [step for step in mended.steps if isinstance(step, Load) and step.place in places]
        wanted = {load.layer: load.to for load in loads if load.layer is not None}
        assert each.parts.items() <= wanted.items()
        assert mended.shadowed_bytes > 0
        every = [step for step in mended.steps if isinstance(step, Load)]
        of_each = [sum(load.size_bytes for load in every if load.place == place) for place in {e.place for e in every}]
        assert mended.note.device_bytes == max(of_each)
        assert mended.note.read_bytes <= sum(of_each) - mended.shadowed_bytes
        assert (mended.note.read_bytes == 0) == (mended.shadowed_bytes == sum(of_each))
        if most == PLENTY:
            assert each.parts == wanted
            assert each.size_bytes == each.read_bytes
            assert mended.shadowed_bytes == sum(step.size_bytes for step in mended.steps if isinstance(step, Load))


@pytest.mark.timeout(600)  # several plans for each example
@laws
@given(plans())
def test_what_is_left_after_a_loss_still_keeps_to_the_laws(asked: tuple[PlanRequest, Plan, int]) -> None:
    request, plan, most = asked
    plan = with_shadows(request, plan, Takeover(), most).plan
    assume(plan.shadows)
    lost = plan.shadows[0].against
    left = replace(request, cluster=request.cluster.without({lost}))
    after = repair(left, plan, Takeover()).plan
    after.check()
    own = {stage.slot: range(stage.layers[0], stage.layers[1] + 1) for stage in after.stages}
    assert all(size <= most for size in kept_bytes(after.shadows).values())
    for each in after.shadows:
        assert each.against != lost
        assert not set(each.layers) & set(own[each.slot])
    again = with_shadows(left, after, Takeover(), most).plan  # as the improvement that follows has it
    assert sum(kept_bytes(again.shadows).values()) >= sum(kept_bytes(after.shadows).values())


def test_without_memory_nothing_is_worked_out() -> None:
    request, plan = planned(2, 2, 3)
    assert with_shadows(request, plan, Takeover(), 0).plan is not None
    assert with_shadows(request, plan, Takeover(), 0).plan.shadows == ()
    assert (
        with_shadows(request, plan, Takeover(), 1).note
        == "no shadows: no slot has host memory left for a layer of another"
    )


def test_on_one_node_nothing_is_kept_and_it_is_said_why() -> None:
    cards = a_cluster(2).nodes[0].devices[0]
    cluster = Cluster((Node("a", (msgspec.structs.replace(cards, count=3),)),), profiles=a_cluster(2).profiles)
    request = a_request(cluster, min_stages=2, time_limit_seconds=0.5)
    found = with_shadows(request, make_plan(request, quick=True).plan, Takeover(), PLENTY)
    assert found.plan.shadows == ()
    assert "every stage is on a" in found.note


def test_a_loss_that_no_repair_is_known_for_is_named() -> None:
    request, plan = planned(2, 2, 3, min_stages=3)
    found = with_shadows(replace(request, min_stages=3), plan, Takeover(), PLENTY)
    assert found.plan.shadows == ()
    assert found.note == "no shadows against the loss of a, b, c: no repair is known for it"


def test_processors_keep_them_in_what_the_plan_leaves() -> None:
    device = Device("cpu", memory_bytes=400 * MIB, usable_fraction=1.0, overhead_bytes=0)
    cluster = Cluster(tuple(Node(name, (device,)) for name in "abc"), profiles={"cpu": a_profile(type="cpu")})
    request = a_request(cluster, min_stages=3, time_limit_seconds=0.5)
    plan = make_plan(request, quick=True).plan
    found = with_shadows(with_one_stage_fewer(request), plan, Takeover(), PLENTY).plan
    left = {stage.slot: stage.devices[0].usable_bytes - stage.memory.total_bytes for stage in plan.stages}
    assert found.shadows
    assert all(each.room_bytes == left[each.slot] for each in found.shadows)


@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.builds(Read, st.integers(0, 5), st.just("any4"), st.integers(1, 9)), max_size=6),
    ),
    st.integers(0, 30),
)
def test_what_is_kept_fits_and_nothing_more_would(reads: dict[str, list[Read]], room: int) -> None:
    kept = chosen(reads, room)
    left = room - sum(each.size_bytes for each in kept)
    assert left >= 0
    assert all(each in kept or each.size_bytes > left for listed in reads.values() for each in listed)
    assert kept == chosen(dict(reversed(reads.items())), room)


def test_the_loss_that_leaves_most_to_be_read_comes_first() -> None:
    large = [Read(layer, "any4", 4) for layer in range(4)]
    small = [Read(layer, "any4", 4) for layer in range(4, 6)]
    assert chosen({"a": small, "b": large}, 8) == {*large[:2]}
    assert chosen({"a": small, "b": large}, 12) == {*large[:2], small[0]}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"against": "a"}, "on another node"),
        ({"node": "b"}, "on another node"),
        ({"slot": "nobody"}, "on another node"),
        ({"layers": (5, 4)}, "ascending"),
        ({"layers": (4, 6)}, "ascending"),
        ({"format": ("dense",)}, "1 formats"),
        ({"layer_bytes": ()}, "0 sizes"),
    ],
)
def test_a_plan_with_odd_shadows_is_refused(changes: dict[str, Any], why: str) -> None:
    _, plan = planned(2, 2, 3, min_stages=3)
    slot = plan.stages[0].slot
    shadow = Shadow(
        slot=slot,
        node="a",
        against="b",
        layers=(4, 5),
        format=("dense", "dense"),
        layer_bytes=(1, 1),
        read_bytes=2,
        room_bytes=2,
    )
    plan = msgspec.structs.replace(plan, shadows=(shadow,))
    plan.check()
    with pytest.raises(ContractError, match=why):
        msgspec.structs.replace(plan, shadows=(msgspec.structs.replace(shadow, **changes),)).check()


def test_a_plan_without_shadows_keeps_none_after_a_loss() -> None:
    _, plan = planned(2, 2, 3)
    assert still_kept(plan, plan, a_request().model) == ()
