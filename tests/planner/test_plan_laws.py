"""Laws that every plan keeps, whatever the devices, the load and the wishes."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.formats import BITS_OF_FORMAT, Method
from strata_planner.contract.kv import KV_BITS
from strata_planner.contract.plan import NO_SPECULATION, Plan, Speculation
from strata_planner.errors import InfeasibleError, OutOfTimeError, PlannerError
from strata_planner.question.request import PlanRequest, Solver
from strata_planner.question.workload import Workload
from strata_planner.replan.decision import replan
from strata_planner.search.exact.problem import SolutionStatus
from strata_planner.search.layouts.stages import with_concurrency
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import PlanOutcome, make_plan
from tests.laws import share
from tests.planner.builders import EAGLE, HEAD, a_cluster, a_model, a_request, a_wide_model

laws = settings(
    max_examples=share(12, 8), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
ALLOWED: dict[Method, list[tuple[int, ...]]] = {
    "roundToNearest": [(16,), (4, 8), (3, 4, 8, 16)],
    "anyPrecision": [(5, 16), (3, 4, 5, 6, 7, 8, 16)],
    "float8": [(8,), (8, 16)],
}
DRAFT = Speculation("draft", 4, draft_uri="file:///models/smaller")
SOLVERS = st.sampled_from(["auto", "pipeline"])
memories = st.lists(st.floats(1.0, 12.0), min_size=1, max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    memory = draw(memories)
    speeds = tuple(draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in memory)
    method: Method = draw(st.sampled_from(sorted(ALLOWED)))
    workload = Workload(draw(st.integers(1, 60)), draw(st.integers(1, 40)), draw(st.integers(1, 9)))
    guess, small = draw(st.sampled_from([(NO_SPECULATION, None), (DRAFT, a_model(num_hidden_layers=1)), (EAGLE, HEAD)]))
    return a_request(
        a_cluster(*memory, speeds=speeds),
        workload=workload,
        max_model_len=64,
        theta=draw(st.sampled_from([0.0, 0.01, 1.0, 100.0])),
        method=method,
        activation_bits=draw(st.sampled_from([(16,), (8, 16)])),
        allowed_bits=draw(st.sampled_from(ALLOWED[method])),
        compute_type=draw(st.sampled_from(["bfloat16", "float32"])),
        kv_bits=draw(st.sampled_from(KV_BITS)),
        min_stages=draw(st.integers(1, len(memory))),
        solver=draw(SOLVERS),
        speculation=guess,
        draft_model=small,
    )


def planned(request: PlanRequest) -> PlanOutcome | None:
    try:
        return make_plan(request)
    except InfeasibleError:
        return None


@laws
@given(requests())
def test_a_plan_is_whole_and_within_memory(request: PlanRequest) -> None:
    outcome = planned(request)
    assume(outcome is not None)
    assert outcome is not None
    plan = outcome.plan
    plan.check()  # every layer once, in order
    assert sum(replica.concurrency for replica in plan.replicas) <= request.workload.concurrency
    for replica in plan.replicas:
        stages = replica.stages
        assert request.min_stages <= len(stages)
        assert [stage.embedding for stage in stages] == [stage.stage == 0 for stage in stages]
        assert [stage.head for stage in stages] == [stage.stage == len(stages) - 1 for stage in stages]
        batch = replica.micro_batch
        assert 1 <= batch.prefill <= replica.concurrency
        assert 1 <= batch.decode <= replica.concurrency
        assert batch.max_step_tokens > batch.decode, "prompts go on whatever decodes"
        for stage in stages:
            memory = stage.memory
            parts = memory.weights_bytes + memory.embedding_bytes + memory.kv_bytes + memory.temporary_bytes
            assert memory.total_bytes == parts + memory.draft_bytes <= stage.devices[0].usable_bytes
            passes_states = request.speculation.has_head and len(stages) > 1
            assert (memory.draft_bytes > 0) == (passes_states or (stage.leader and request.draft_model is not None))
            assert stage.kv_page_budget >= with_concurrency(request, replica.concurrency).kv_pages
            assert set(stage.bits) <= set(request.allowed_bits)
            assert [BITS_OF_FORMAT[name] for name in stage.format] == list(stage.bits)
    places = [place for stage in plan.stages for place in stage.places]
    assert len(set(places)) == len(places)


@laws
@given(requests())
def test_a_plan_survives_json(request: PlanRequest) -> None:
    outcome = planned(request)
    if outcome:
        assert Plan.decode(outcome.plan.encode()) == outcome.plan


def value(request: PlanRequest) -> float:
    """By the request's metric."""
    outcome = planned(request)
    if outcome is None:
        return -float("inf")
    assert request.solver == "auto" or outcome.stats.status is SolutionStatus.OPTIMAL
    return value_of_plan(request, outcome.plan)


def is_no_worse(one: float, other: float) -> bool:
    return one >= other - 1e-5 * abs(other)


@laws
@given(memories, st.floats(1.0, 3.0), st.sampled_from([0.0, 1.0, 50.0]), SOLVERS)
def test_more_memory_is_never_worse(memory: list[float], factor: float, theta: float, solver: Solver) -> None:
    less = value(a_request(a_cluster(*memory), theta=theta, solver=solver))
    more = value(a_request(a_cluster(*(each * factor for each in memory)), theta=theta, solver=solver))
    assert is_no_worse(more, less)


@laws
@given(memories, st.floats(1.0, 12.0), SOLVERS)
def test_one_more_device_is_never_worse(memory: list[float], another: float, solver: Solver) -> None:
    few = value(a_request(a_cluster(*memory[:2]), solver=solver))
    assert is_no_worse(value(a_request(a_cluster(*memory[:2], another), solver=solver)), few)


@laws
@given(requests(), st.randoms(use_true_random=False))
def test_a_running_plan_is_never_made_worse(request: PlanRequest, draw: Random) -> None:
    """Whoever made it, for whatever narrower wish."""
    request = replace(request, solver="auto")
    narrower = replace(
        request,
        max_replicas=draw.choice([None, 1]),
        allowed_bits=tuple(draw.sample(request.allowed_bits, draw.randint(1, len(request.allowed_bits)))),
    )
    hint = planned(narrower)
    assume(hint is not None)
    assert hint is not None
    found = replan(request, hint.plan)
    assert is_no_worse(value_of_plan(request, found.plan), value_of_plan(request, hint.plan))


@laws
@given(requests(), st.floats(0.02, 0.5))
def test_a_longer_search_is_never_worse(request: PlanRequest, seconds: float) -> None:
    request = replace(request, solver="auto")
    try:
        short = make_plan(replace(request, time_limit_seconds=seconds))
    except (InfeasibleError, OutOfTimeError):
        assume(condition=False)
    long = make_plan(replace(request, time_limit_seconds=20 * seconds + 1))
    assert is_no_worse(value_of_plan(request, long.plan), value_of_plan(request, short.plan))


@laws
@given(requests())
def test_no_other_way_to_ask_gives_a_better_plan(request: PlanRequest) -> None:
    """The same metric, whatever the search is restricted to."""
    request = replace(request, solver="auto")
    best = value(request)
    for solver in ("layout", "pipeline", "exact"):
        other = planned(replace(request, solver=solver))  # type: ignore[arg-type]
        if other is not None:
            of_it = value_of_plan(request, other.plan)
            assert is_no_worse(best, of_it), solver


@laws
@given(requests(), st.randoms(use_true_random=False))
def test_names_and_order_of_nodes_change_nothing(request: PlanRequest, draw: Random) -> None:
    nodes = list(request.cluster.nodes)
    names = draw.sample(["p", "q", "r", "s", "t", "u"], len(nodes))
    renamed = [structs.replace(node, name=name) for node, name in zip(nodes, names, strict=True)]
    draw.shuffle(renamed)
    other = replace(request, cluster=structs.replace(request.cluster, nodes=tuple(renamed)))
    assert value(other) == value(request)


@laws
@given(memories, st.floats(0.0, 10.0), st.floats(1.0, 1000.0))
def test_a_larger_theta_never_lowers_quality(memory: list[float], theta: float, factor: float) -> None:
    plans = [planned(a_request(a_cluster(*memory), theta=each)) for each in (theta, theta * factor + 1.0)]
    assume(None not in plans)
    penalties = [each.plan.prediction.quality_penalty for each in plans if each]
    assert penalties[1] <= penalties[0] * (1 + 1e-4) + 1e-9


def test_bits_rise_with_theta() -> None:
    def bits(theta: float) -> float:
        stages = make_plan(a_request(a_cluster(64, 64), theta=theta)).plan.replicas[0].stages
        return sum(each for stage in stages for each in stage.bits) / 6

    assert bits(0.0) < bits(1e6) == 16


def test_a_model_that_fits_one_device_is_not_split_for_a_single_sequence() -> None:
    request = a_request(a_cluster(64, 64), workload=Workload(8, 8, 1))
    assert len(make_plan(request).plan.replicas[0].stages) == 1


def test_min_stages_splits_it_all_the_same() -> None:
    request = a_request(a_cluster(64, 64), workload=Workload(8, 8, 1), min_stages=2)
    assert len(make_plan(request).plan.replicas[0].stages) == 2


def test_max_stages_is_kept() -> None:
    request = a_request(a_cluster(64, 64, 64), min_stages=2, max_stages=2)
    assert len(make_plan(request).plan.replicas[0].stages) == 2


def test_the_faster_device_gets_more_layers() -> None:
    request = a_request(a_cluster(64, 64, speeds=(1.0, 5.0)), min_stages=2)
    layers = {stage.node: len(stage.bits) for stage in make_plan(request).plan.replicas[0].stages}
    assert layers["b"] > layers["a"]


def test_a_tight_device_mixes_precisions() -> None:
    """Small enough for some layers at 16 bits only: the answer must use the room it has."""
    request = a_request(a_cluster(275, 275), model=a_wide_model(), theta=1e3, workload=Workload(16, 16, 2))
    outcome = make_plan(request)
    assert all(len(set(stage.bits)) > 1 for stage in outcome.plan.replicas[0].stages)
    assert outcome.plan.prediction.bound_by.startswith("memory of stage")


@pytest.mark.parametrize("seconds", [1e-9, 0.02, 30.0])
def test_a_time_limit_never_gives_a_broken_plan(seconds: float) -> None:
    request = a_request(a_cluster(64, 64, 64), time_limit_seconds=seconds)
    try:
        make_plan(request).plan.check()
    except PlannerError as error:
        message = str(error)
    else:
        message = "timeLimitSeconds"
    assert "timeLimitSeconds" in message
