"""From measured seconds to the table of lengths: it names the fastest, and who is ahead by noise alone is not ahead."""

from typing import Any

import pytest
from msgspec import structs

from strata_planner.contract.latencies import LatencyProfile, StrategyPoint
from strata_planner.contract.plan import Plan
from strata_planner.contract.roles import roles_of
from strata_planner.contract.strategies import MEGATRON_ONLY, StrategyName, StrategyTable, strategy_for
from strata_planner.contract.values import ContractError
from strata_planner.costs.fitted import FittedLatency
from strata_planner.partition.measured import measured_table
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.request import PlanRequest
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_model, a_profile, a_request
from tests.planner.latency_profiles import a_latency_profile

Taken = dict[int, dict[StrategyName, float]]


def points(taken: Taken) -> list[StrategyPoint]:
    return [
        StrategyPoint(2, "dense", name, tokens, seconds)
        for tokens, each in taken.items()
        for name, seconds in each.items()
    ]


CASES: dict[str, tuple[Taken, StrategyTable]] = {
    "nothing measured": ({}, MEGATRON_ONLY),
    "never faster": (
        {64: {"megatron": 1, "weight-gathered": 1.1}, 128: {"megatron": 2, "weight-gathered": 2}},
        MEGATRON_ONLY,
    ),
    "ahead by noise": ({64: {"megatron": 1.0, "weight-gathered": 0.985}}, MEGATRON_ONLY),
    "half way": (
        {64: {"megatron": 1.0, "weight-gathered": 1.2}, 256: {"megatron": 1.0, "weight-gathered": 0.8}},
        ((1, "megatron"), (128, "weight-gathered")),
    ),
    "from the first on": (
        {64: {"megatron": 1.0, "projection-replicated": 0.8}},
        ((1, "megatron"), (64, "projection-replicated")),
    ),
    "and back": (
        {
            64: {"megatron": 1.0, "weight-gathered": 1.1},
            128: {"megatron": 1.0, "weight-gathered": 0.5},
            256: {"megatron": 1.0, "weight-gathered": 1.5},
        },
        ((1, "megatron"), (72, "weight-gathered"), (215, "megatron")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_table_says_where_another_strategy_takes_over(case: str) -> None:
    taken, table = CASES[case]
    assert measured_table(points(taken)) == table


def test_what_was_the_fastest_last_goes_on() -> None:
    table = measured_table(points(CASES["half way"][0]))
    assert strategy_for(table, 1 << 20, decoding=False) == "weight-gathered"
    assert strategy_for(table, 1 << 20, decoding=True) == "megatron"


@pytest.mark.parametrize(
    "table",
    [
        ((2, "megatron"),),
        ((1, "megatron"), (1, "weight-gathered")),
        ((1, "megatron"), (9, "megatron"), (8, "megatron")),
    ],
)
def test_tables_that_do_not_ascend_from_one_are_refused(table: StrategyTable) -> None:
    plan = make_plan(a_request()).plan
    told = plan.encode().replace(
        b'"tensorParallel":1',
        b'"tensorParallel":1,"strategies":' + str([list(each) for each in table]).replace("'", '"').encode(),
        1,
    )
    with pytest.raises(ContractError, match="ascending, the first from 1"):
        Plan.decode(told)


def a_group_of_processors(**changes: Any) -> PlanRequest:
    cluster = Cluster((Node("a", (Device(CPU, 2, threads=1),)),)).with_profile(
        a_profile(threads=1, memory_bytes=4 << 30)
    )
    wishes: dict[str, Any] = {"tensor_parallel": (2,), "solver": "layout", "allowed_bits": (16,)}
    return a_request(cluster, **(wishes | changes))


MEASURED = points(CASES["half way"][0])


@pytest.mark.parametrize(("ranks", "table"), [(2, CASES["half way"][1]), (3, ())])
def test_a_plan_carries_what_was_measured_of_as_many_ranks(ranks: int, table: StrategyTable) -> None:
    """Of other ones it predicts, and on processors nothing is ahead by enough to be told."""
    told = tuple(structs.replace(each, ranks=ranks) for each in MEASURED)
    source = FittedLatency(a_latency_profile(strategies=told))
    outcome = make_plan(a_group_of_processors(latency_sources=(source,)))
    (stage,) = outcome.plan.stages
    assert stage.strategies == table
    assert Plan.decode(outcome.plan.encode()) == outcome.plan
    assert {role.strategies for roles in roles_of(outcome.plan).values() for role in roles} == {table}
    said = "weight-gathered from 128 tokens of a step; decoding is megatron (measured)" if table else "(predicted)"
    assert any(
        note.startswith("tensor partition of 2 x cpu: megatron from 1 tokens") and note.endswith(said)
        for note in outcome.notes
    )
    assert LatencyProfile.decode(source.profile.encode()) == source.profile


def test_a_model_that_cannot_switch_says_why_whatever_was_measured() -> None:
    source = FittedLatency(a_latency_profile(strategies=tuple(MEASURED)))
    model = structs.replace(a_model(), architecture="gemma2")
    outcome = make_plan(a_group_of_processors(latency_sources=(source,), model=model))
    assert not any(stage.strategies for stage in outcome.plan.stages)
    assert any("megatron (layers of 'gemma2' do not go as Llama's dense ones do)" in note for note in outcome.notes)
