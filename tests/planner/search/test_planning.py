"""The front door: one pipeline, or replicas and groups where the request asks for a layout."""

from typing import Any

import pytest

from strata_planner.contract.plan import Plan
from strata_planner.errors import InfeasibleError, OutOfTimeError, WorkloadError
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.search import planning
from strata_planner.search.layouts import search as layout_search
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from tests.laws import swept
from tests.planner.builders import CARD, MIB, a_cluster, a_profile, a_request, a_wide_model


def a_layout_request(**wishes: Any) -> PlanRequest:
    nodes = tuple(Node(name, (Device("L4", 2),)) for name in ("a", "b"))
    return a_request(Cluster(nodes), model=a_wide_model(), time_limit_seconds=60.0, **wishes)


def test_a_layout_forms_replicas_that_each_hold_the_model() -> None:
    outcome = make_plan(a_layout_request())
    assert Plan.decode(outcome.plan.encode()) == outcome.plan
    assert len(outcome.plan.replicas) > 1
    assert {stage.tensor_parallel for each in outcome.plan.replicas for stage in each.stages} == {1}
    assert sum(replica.concurrency for replica in outcome.plan.replicas) == 4


def test_groups_say_how_their_layers_are_cut() -> None:
    outcome = make_plan(a_layout_request(objective=Objective("latency"), tensor_parallel=(1, 2)))
    assert any(stage.tensor_parallel == 2 for each in outcome.plan.replicas for stage in each.stages)
    assert any(
        note.startswith("tensor partition of 2 x L4: megatron (several L4 do not read each other's weights); predicted")
        for note in outcome.notes
    )


def test_no_more_is_in_flight_than_asked_for_whatever_the_goal() -> None:
    asked = Objective("slo", deadline_seconds=1.0, requests_per_second=1.0)
    plan = make_plan(a_request(a_cluster(64, 64), objective=asked)).plan
    assert sum(replica.concurrency for replica in plan.replicas) <= 4


MIXED: dict[str, dict[str, Any]] = {
    "seven devices": {"cluster": a_cluster(160, 160, 160, 1, 1, 1, 1)},
    "another goal": {"cluster": a_cluster(160, 160, 160), "objective": Objective("latency")},
}


@pytest.mark.parametrize("name", MIXED)
def test_a_bound_that_only_mixed_bits_keep_is_kept(name: str) -> None:
    changes = MIXED[name]
    request = a_request(model=a_wide_model(), penalty_bound=200.0, allowed_bits=(4, 8), theta=0.0, **changes)
    plan = make_plan(request).plan
    assert plan.prediction.quality_penalty <= 200
    assert {bits for stage in plan.stages for bits in stage.bits} == {4, 8}


NOTHING: dict[str, tuple[dict[str, Any], str]] = {
    "no nodes": ({"cluster": Cluster(())}, "no device has usable memory"),
    "no groups": ({"cluster": a_cluster(64, 64), "tensor_parallel": (2,)}, r"tensorParallel \[2\]: no groups"),
}


@pytest.mark.parametrize(("changes", "words"), NOTHING.values(), ids=NOTHING)
def test_what_no_search_finds_says_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        make_plan(a_request(**changes))


def test_what_the_clock_cut_is_not_said_to_be_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_laid_out", lambda *_: None)
    monkeypatch.setattr(planning, "_PROOF_SECONDS", 0.0)
    with pytest.raises(OutOfTimeError, match=r"no plan within .*raise planning\.timeLimitSeconds") as told:
        make_plan(a_request(a_cluster(64, 64)))
    assert not isinstance(told.value, InfeasibleError)


def test_prices_tell_devices_apart() -> None:
    dear, cheap = (
        Device(CARD, memory_bytes=64 * MIB, usable_fraction=1.0, overhead_bytes=0, hourly_cost=cost)
        for cost in (10.0, 1.0)
    )
    for devices in ((dear, cheap), (cheap, dear)):
        cluster = Cluster((Node("a", devices),), profiles={CARD: a_profile(type=CARD)})
        (stage,) = make_plan(a_request(cluster, objective=Objective("cost"))).plan.stages
        assert stage.devices[0].index == devices.index(cheap)


def test_one_pipeline_is_planned_where_it_is_asked_for() -> None:
    assert len(make_plan(a_request(a_cluster(64, 64))).plan.replicas) == 2  # each device holds the model
    assert len(make_plan(a_request(a_cluster(64, 64), solver="pipeline")).plan.replicas) == 1


@pytest.mark.slow  # layouts/test_search.py has it of the search
@pytest.mark.parametrize("goal", swept(["throughput", "latency", "slo"], ["slo"]))
def test_the_same_question_has_the_same_answer(goal: str) -> None:
    asked = Objective(goal, deadline_seconds=5.0, requests_per_second=2.0)  # type: ignore[arg-type]
    first, second = (make_plan(a_layout_request(objective=asked, tensor_parallel=(1, 2))).plan for _ in range(2))
    assert first == second


def test_a_proof_that_takes_more_work_than_there_is_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock has cut it: another run ends with the same plan."""
    request = a_layout_request()
    whole = make_plan(request)
    monkeypatch.setattr(layout_search, "_WORK_OF_PROOFS", 1.0)
    outcome = make_plan(request)
    told = "proving layers and bits took more than its limit: they, and which devices form a replica, are searched, not proven"
    assert told in outcome.notes
    assert told not in whole.notes
    assert outcome.plan.search is not None
    assert (outcome.plan.search.ended, outcome.plan.search.was_cut) == ("workLimit", False)
    assert value_of_plan(request, outcome.plan) <= value_of_plan(request, whole.plan)


def test_a_step_carries_no_more_of_prompts_than_was_asked_for() -> None:
    for most in (16, 100):
        plan = make_plan(a_request(a_cluster(64, 64), chunk_tokens=most)).plan
        for replica in plan.replicas:
            batch = replica.micro_batch
            assert 1 <= batch.max_step_tokens - batch.decode <= most
    with pytest.raises(WorkloadError, match="chunkTokens 0: at least 1 is needed"):
        make_plan(a_request(chunk_tokens=0))
