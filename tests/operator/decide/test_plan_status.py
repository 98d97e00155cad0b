"""What status says of a plan: the goal's number of it and of its alternatives in one unit, and that the clock cut the search for it."""

import msgspec

from strata_planner.contract.judged import SearchEnded, Stated
from strata_planner.contract.plan import Alternative, Plan
from tests.operator.world import AWorld, World


def told(plan: Plan) -> Plan:
    return msgspec.structs.replace(
        plan,
        objective=Stated(2.5, "s a request", "less"),
        search=SearchEnded("timeLimit", 30.0),
        alternatives=(
            Alternative("one device", plan.prediction, -3.25, "30.0% worse", 3.25),
            Alternative("16 bits everywhere", None, None, "does not fit"),
        ),
    )


def planned(world: World) -> str:
    return next(each.message for each in world.status.conditions if each.type == "Planned")


def test_the_goals_number_stands_in_status_in_its_own_unit(a_world: AWorld) -> None:
    world = a_world()
    world.planner.says = told
    world.passes(60)
    plan = world.status.plan
    assert plan is not None
    assert plan.objective == "2.5 s a request"
    assert [each.objective for each in plan.alternatives] == ["3.25 s a request", ""]


def test_that_the_clock_cut_the_search_is_said_in_status_and_in_the_condition(a_world: AWorld) -> None:
    world = a_world()
    world.planner.says = told
    world.passes(60)
    assert world.status.plan is not None
    assert world.status.plan.search_ended == "timeLimit"
    assert planned(world).endswith("the search was cut by the clock after 30 s: another run may find another plan")
    world.planner.says = lambda plan: msgspec.structs.replace(told(plan), search=SearchEnded("settled"))
    world.edit(precision={"allowed": [8]})
    world.passes(60)
    assert world.status.plan.search_ended == "settled"
    assert "clock" not in planned(world)


def test_of_a_plan_that_says_nothing_of_itself_nothing_is_said(serving: World) -> None:
    assert serving.status.plan is not None
    assert (serving.status.plan.objective, serving.status.plan.search_ended) == ("", "")
