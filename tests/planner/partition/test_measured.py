"""From measured seconds to the table of lengths: it names the fastest, and who is ahead by noise alone is not ahead."""

import pytest

from strata_planner.contract.latencies import StrategyPoint
from strata_planner.contract.plan import Plan
from strata_planner.contract.strategies import MEGATRON_ONLY, StrategyName, StrategyTable, strategy_for
from strata_planner.contract.values import ContractError
from strata_planner.partition.measured import measured_table
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_request

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
    "ahead by noise": ({64: {"megatron": 1.0, "weight-gathered": 0.995}}, MEGATRON_ONLY),
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
        ((1, "megatron"), (72, "weight-gathered"), (181, "megatron")),
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
