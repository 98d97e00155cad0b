"""Standing orders: each the repair of its loss, of slots that run, and the same every time."""

import io
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from strata_planner.answer.explain import render_plan
from strata_planner.contract.plan import Plan
from strata_planner.contract.values import ContractError
from strata_planner.errors import InfeasibleError, OutOfTimeError
from strata_planner.question.request import PlanRequest
from strata_planner.replan.repair import Takeover, repair
from strata_planner.replan.standing_orders import only, single_losses, with_orders
from strata_planner.search.planning import make_plan
from tests.laws import share
from tests.planner.builders import a_cluster, a_request

laws = settings(
    max_examples=share(24, 10),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # plans are searched for each example
)


def planned(*memory: float, **changes: Any) -> tuple[PlanRequest, Plan]:
    """As it is repaired: a plan of many stages for the sake of the test, that may lose one."""
    request = a_request(a_cluster(*memory), time_limit_seconds=0.5, method="anyPrecision", **changes)
    return replace(request, min_stages=1), make_plan(request, quick=True).plan


@laws
@given(
    st.lists(st.sampled_from([1.5, 2.0, 3.0, 6.0]), min_size=2, max_size=4),
    st.sampled_from(["pipeline", "layout"]),
    st.integers(1, 3),
)
def test_each_is_the_repair_of_its_loss_of_slots_that_run(memory: list[float], solver: str, stages: int) -> None:
    try:
        request, plan = planned(*memory, solver=solver, min_stages=min(stages, len(memory)))
    except (InfeasibleError, OutOfTimeError):
        assume(condition=False)
    found = with_orders(request, plan, Takeover())
    ordered = found.plan
    assert ordered == with_orders(request, ordered, Takeover()).plan
    assert msgspec.structs.replace(ordered, orders=None) == plan  # nothing else of it changes
    assert Plan.decode(ordered.encode()) == ordered
    assert ordered.orders is not None
    slots = {stage.slot for stage in plan.stages}
    assert {order.lost for order in ordered.orders} <= {*single_losses(plan)}
    assert bool(found.note) == (len(ordered.orders) < len(single_losses(plan)))
    for order in ordered.orders:
        lost = {place for stage in plan.stages if stage.slot in order.lost for place in stage.places}
        left = replace(request, cluster=only(request.cluster, plan.places - lost))
        assert ordered.after(order) == msgspec.structs.replace(
            repair(left, plan, Takeover()).plan, objective=plan.objective
        )
        assert {stage.slot for stage in ordered.after(order).stages} <= slots - {*order.lost}


def test_a_node_with_several_slots_may_be_lost_whole() -> None:
    _, plan = planned(3.0, 3.0, 3.0, min_stages=3, max_replicas=1)
    first, second, third = plan.stages
    beside = msgspec.structs.replace(second, node=first.node)
    shared = msgspec.structs.replace(
        plan, replicas=(msgspec.structs.replace(plan.replicas[0], stages=(first, beside, third)),)
    )
    assert single_losses(shared) == (*single_losses(plan), tuple(sorted((first.slot, second.slot))))


def test_none_are_worked_out_where_none_are_wanted() -> None:
    request, plan = planned(3.0, 3.0, min_stages=2)
    assert with_orders(request, plan, Takeover(), wanted=False).plan == plan


def test_a_loss_that_nobody_can_repair_is_told() -> None:
    request, plan = planned(3.0, 3.0, min_stages=2)
    found = with_orders(replace(request, min_stages=2), plan, Takeover())
    assert found.plan.orders == ()
    assert "no standing order against the loss of" in found.note


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda order: {"lost": ("nobody",)}, "slots of the plan"),
        (lambda order: {"lost": ()}, "slots of the plan"),
        (lambda order: {"replicas": (), "left_out": ()}, "change the replicas that lose a slot"),
        (lambda order: {"replicas": (), "left_out": (0,)}, "change the replicas that lose a slot"),
    ],
)
def test_orders_that_cannot_be_are_refused(change: Any, said: str) -> None:
    request, plan = planned(3.0, 3.0, 3.0, min_stages=3, max_replicas=1)
    ordered = with_orders(request, plan, Takeover()).plan
    assert ordered.orders
    wrong = msgspec.structs.replace(ordered.orders[0], **change(ordered.orders[0]))
    with pytest.raises(ContractError, match=said):
        Plan.decode(msgspec.structs.replace(ordered, orders=(wrong,)).encode())


def test_people_read_what_is_done_about_each_loss() -> None:
    request, plan = planned(3.0, 3.0, 3.0, min_stages=3, max_replicas=1)
    ordered = with_orders(request, plan, Takeover()).plan
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_plan(ordered))
    text = console.export_text()
    assert ordered.orders
    assert all(f"{order.lost[0]} " in text for order in ordered.orders)
    assert "standing orders" in text
