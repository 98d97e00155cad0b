"""What other devices and precisions would change: laws of gains, and tables and JSON that say the same."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from strata_planner.answer.compared import Compared, compared
from strata_planner.answer.front import front
from strata_planner.answer.next_device import Offer, Ranked, next_device
from strata_planner.answer.studies import front_table, next_device_table, what_if_table
from strata_planner.answer.what_if import what_if
from strata_planner.contract.plan import Plan
from strata_planner.question.changes import changed, parse_change, parse_prices, priced
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.search.metric import gain, value_of_plan
from strata_planner.search.planning import make_plan
from tests.laws import share, swept
from tests.planner.builders import CARD, a_cluster, a_model, a_request, a_wide_model

laws = settings(max_examples=share(4), deadline=None)
memories = st.lists(st.sampled_from([1.2, 1.6, 3.0, 12.0]), min_size=1, max_size=2)
GOALS = st.sampled_from([Objective(), Objective("latency"), Objective("slo", 5.0, 2.0)])


def after(request: PlanRequest, change: str) -> PlanRequest:
    return replace(request, cluster=changed(request.cluster, parse_change(change)))


def looked_at(request: PlanRequest, *changes: str) -> tuple[Plan, list[Compared]]:
    plan = make_plan(request, quick=True).plan
    return what_if(request, plan, [(change, after(request, change)) for change in changes], quick=True)


def shown(table: Table) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.mark.slow  # test_plan_laws.py has a device more
@laws
@given(memories, st.integers(1, 2), st.sampled_from("ax"), GOALS, st.sampled_from(["auto", "pipeline"]))
def test_devices_more_are_never_worse(memory: list[float], count: int, node: str, goal: Objective, solver: Any) -> None:
    objective = Objective() if solver == "pipeline" else goal
    request = a_request(a_cluster(12.0, *memory), objective=objective, solver=solver)
    plan, (more,) = looked_at(request, f"+{count}x{CARD}@{node}")
    assert more.gain is not None
    assert more.gain >= 0
    assert more.value is not None
    assert more.gain == gain(more.value, value_of_plan(request, plan))


@pytest.mark.slow
@laws
@given(memories, GOALS)
def test_devices_fewer_are_never_better(memory: list[float], goal: Objective) -> None:
    request = a_request(a_cluster(12.0, *memory), objective=goal)
    first = make_plan(request, quick=True).plan
    plan, (fewer,) = looked_at(request, "-b")
    assert fewer.gain is not None
    assert fewer.gain <= 0
    assert value_of_plan(request, plan) >= value_of_plan(request, first)


@pytest.mark.slow  # others that fit
def test_what_does_not_fit_any_more_says_why() -> None:
    _, (fewer,) = looked_at(a_request(a_cluster(1.2, 1.2)), "-b")
    assert fewer.plan is fewer.gain is None
    assert fewer.reason.startswith("does not fit: ")


def test_tokens_have_a_price_where_all_devices_have() -> None:
    plain = a_request(a_cluster(64, 64))
    request = replace(plain, cluster=priced(plain.cluster, parse_prices([f"{CARD}=2"], plain.cluster)))
    plan, (fewer,) = looked_at(request, "-b")
    assert fewer.hourly_cost == 2
    assert fewer.plan is not None
    hourly_tokens = fewer.plan.prediction.tokens_per_second * 3600
    assert fewer.cost_per_million_tokens == pytest.approx(2e6 / hourly_tokens)
    assert compared("", plain, plan, 1.0).cost_per_million_tokens is None
    text = shown(what_if_table(compared("as it is", request, plan, 1.0), [fewer]))
    assert all(
        word in text for word in ("as it is", "-b", f"{fewer.gain:+.1%}", f"{fewer.cost_per_million_tokens:.4g}")
    )


def ranked(prices: dict[str, float]) -> list[Ranked]:
    request = a_request(a_cluster(3.0), max_stages=2)
    offers = []
    for type_ in ("T4", "L4", "H100", CARD):
        asked = after(request, f"+1x{type_}@new")
        offers.append(Offer(type_, asked, prices.get(type_)))
    _, rows = next_device(request, make_plan(request, quick=True).plan, offers, thorough=1)
    return rows


@pytest.mark.slow
def test_offers_are_ranked_by_gain_and_told_for_their_price() -> None:
    rows = ranked({"H100": 100.0, "T4": 0.1})
    gains = [each.compared.gain or 0.0 for each in rows]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0
    known = {each.offer.type: each.gain_for_price for each in rows}
    assert known["L4"] is None
    assert (known["T4"] or 0) > (known["H100"] or 0) > 0
    assert {each.offer.type for each in rows if each.thorough} == {rows[0].offer.type, "T4"}
    text = shown(next_device_table(rows))
    assert f"{known['T4']:+.1%} (best)" in text
    assert [json.loads(json.dumps(each.as_json()))["type"] for each in rows] == [each.offer.type for each in rows]


FRONTS: dict[str, dict[str, Any]] = {
    "throughput": {},
    "latency": {"objective": Objective("latency")},
    "one pipeline": {"solver": "pipeline"},
}


@pytest.mark.parametrize("name", swept(FRONTS, ["one pipeline"]))
def test_each_width_is_best_where_the_front_says_so(name: str) -> None:
    request = a_request(a_cluster(300, 300), model=a_wide_model(), theta=0.01, **FRONTS[name])
    plan, rows = front(request, make_plan(request, quick=True).plan)
    widths = {each.bits: each for each in rows if each.compared.plan is not None and each.bits is not None}
    spans = sorted(each.weights for each in widths.values() if each.weights is not None)
    assert spans[0][0] == 0
    assert spans[-1][1] == float("inf")
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    for each in widths.values():
        if each.weights is None:
            continue
        start, end = each.weights
        for weight in (start * 1.01, min(end, start + 1e6) * 0.99):
            asked = replace(request, theta=weight)
            best = max(value_of_plan(asked, other.compared.plan) for other in widths.values() if other.compared.plan)
            assert each.compared.plan is not None
            assert value_of_plan(asked, each.compared.plan) == best
    assert rows[-1].compared.plan == plan
    assert all((each.compared.gain or 0.0) <= 0 for each in rows)  # the chosen one is the best


@pytest.mark.slow  # the test of what does not fit any more has the words
def test_no_width_may_fit_by_itself() -> None:
    """As after a change: the plan is of devices that are gone."""
    plan = make_plan(a_request(a_cluster(300, 300), model=a_wide_model()), quick=True).plan
    small = a_request(a_cluster(1), model=a_wide_model())
    _, rows = front(small, plan)
    assert all(each.remark.startswith("does not fit: ") and each.weights is None for each in rows[:-1])


def test_widths_that_may_not_be_had_say_why() -> None:
    request = a_request(a_cluster(300, 300), model=a_wide_model(), allowed_bits=(4, 8), penalty_bound=200.0)
    _, rows = front(request, make_plan(request, quick=True).plan)
    remarks = {each.bits: each.remark for each in rows}
    assert remarks[3] == "not in precision.allowed, beyond maxPerplexityIncrease"
    assert remarks[4] == "beyond maxPerplexityIncrease"
    assert remarks[8] == ""
    assert remarks[16].startswith(("does not fit: ", "not in precision.allowed"))
    assert remarks[None] == "chosen"
    text = shown(front_table(rows))
    assert "* " in text
    assert "beyond maxPerplexityIncrease" in text


def test_a_checkpoint_that_is_quantized_already_has_no_front() -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    request = a_request(a_cluster(64), model=a_model(quantization_config=stored))
    _, rows = front(request, make_plan(request, quick=True).plan)
    assert [each.remark for each in rows] == ["chosen; the checkpoint is quantized already"]
