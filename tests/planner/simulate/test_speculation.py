"""What speculation should bring a plan: its own costs, drafts that fit into a step, and what it says of where the figures are from."""

import dataclasses

import msgspec
import pytest

from strata_planner.answer.speculation import forecast_lines
from strata_planner.contract.acceptance import RECORD_VERSION, AcceptanceRecord, DraftCounts
from strata_planner.contract.forecast import AtAcceptance, SpeculationForecast
from strata_planner.contract.plan import Plan, Speculation, SpeculationMode
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.simulate.speculation import ASSUMED, forecast, with_forecast
from tests.planner.builders import a_cluster, a_model, a_request, a_wide_model

COUNTS = DraftCounts(1000, 3600, 2500, 5000)


def asked(
    mode: SpeculationMode, tokens: int = 4, *, stages: int = 1, bits: int = 8, concurrency: int = 4
) -> PlanRequest:
    return a_request(
        a_cluster(900, 900),
        model=a_wide_model(),
        speculation=Speculation(mode, tokens),
        method="anyPrecision",
        allowed_bits=(bits,),
        min_stages=stages,
        max_stages=stages,
        solver="pipeline",
        workload=Workload(prompt_tokens=32, output_tokens=16, concurrency=concurrency),
    )


def measured(request: PlanRequest, counts: DraftCounts = COUNTS) -> AcceptanceRecord:
    return AcceptanceRecord(RECORD_VERSION, "a", request.speculation, counts, "2026-11-20")


def told(request: PlanRequest, record: AcceptanceRecord | None = None) -> SpeculationForecast:
    found = forecast(make_plan(request).plan, request, record)
    assert found is not None
    return found


def only(found: SpeculationForecast) -> AtAcceptance:
    (case,) = found.cases
    return case


def test_nothing_is_told_without_speculation() -> None:
    request = asked("none")
    plan = make_plan(request).plan
    assert with_forecast(plan, request) == plan


@pytest.mark.parametrize("stages", [1, 2])
def test_a_plain_step_is_the_plans_own(stages: int) -> None:
    request = asked("selfPrecision", stages=stages)
    plan = make_plan(request).plan
    case = told(request).cases[0]
    of_stages = sum(stage.times.decode_seconds for stage in plan.stages)
    assert case.planned.step_seconds == pytest.approx(of_stages, rel=0.02)
    assert case.one_stream.step_seconds <= case.planned.step_seconds
    assert case.planned.plain_tokens_per_second == plan.prediction.tokens_per_second


def test_the_slowest_of_unlike_stages_works_for_all_micro_batches_in_turn() -> None:
    uneven = dataclasses.replace(asked("selfPrecision", stages=2), cluster=a_cluster(900, 900, speeds=(1.0, 0.1)))
    decode = [stage.times.decode_seconds for stage in make_plan(uneven).plan.stages]
    assert 2 * max(decode) > 1.2 * sum(decode)
    case = told(uneven).cases[0]
    assert case.planned.step_seconds == pytest.approx(2 * max(decode), rel=0.02)
    assert case.one_stream.step_seconds < case.planned.step_seconds / 1.2


def test_a_draft_of_half_the_bits_takes_about_half_a_step_and_a_verification_at_least_one() -> None:
    one = told(asked("selfPrecision")).cases[0].one_stream
    assert 0.4 < one.draft_seconds / one.step_seconds < 0.7  # tables are read too, and the head in full
    assert one.step_seconds <= one.verification_seconds <= 5 * one.step_seconds


@pytest.mark.parametrize("stages", [1, 2])
def test_a_small_model_drafts_in_its_own_time(stages: int) -> None:
    request = dataclasses.replace(
        asked("none", stages=stages, bits=16),
        cluster=a_cluster(1800, 1800),
        speculation=Speculation("draft", 4, draft_uri="file:///small"),
    )
    shapes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    small, same = a_model(**shapes, num_hidden_layers=1), request.model
    one, own = (told(dataclasses.replace(request, draft_model=each)).cases[0].one_stream for each in (small, same))
    assert one.step_seconds == pytest.approx(own.step_seconds)
    assert own.draft_seconds == pytest.approx(own.step_seconds, rel=0.1)  # the model itself takes a step
    assert 0 < one.draft_seconds < 0.9 * own.draft_seconds
    assert one.speed_up > own.speed_up


def test_layers_of_the_drafts_bits_draft_with_themselves() -> None:
    one = told(asked("auto", bits=4)).cases[0].one_stream
    assert one.draft_seconds == 0  # there is nothing to draft with: it looks up
    assert one.speed_up >= 1


def test_guesses_that_are_looked_up_take_no_steps() -> None:
    looked_up, drafted = (told(asked(mode)).cases[0].one_stream for mode in ("suffix", "selfPrecision"))
    assert looked_up.draft_seconds == 0
    assert looked_up.verification_seconds == drafted.verification_seconds
    assert looked_up.speed_up > drafted.speed_up


def test_a_step_of_many_sequences_has_no_room_for_drafts() -> None:
    case = told(asked("selfPrecision", concurrency=16)).cases[-1]
    assert (case.planned.drafts, case.planned.speed_up, case.planned.best_tokens) == (0, 1.0, 0)
    assert case.planned.tokens_per_second == case.planned.plain_tokens_per_second
    assert case.one_stream.drafts == 4


@pytest.mark.parametrize("mode", ["ngram", "suffix", "selfPrecision", "auto"])
def test_the_more_are_right_the_more_it_brings(mode: SpeculationMode) -> None:
    found = told(asked(mode))
    assert [case.acceptance for case in found.cases] == list(ASSUMED)
    for of in (lambda case: case.one_stream, lambda case: case.planned):
        gains = [of(case).speed_up for case in found.cases]
        assert gains == sorted(gains)
        rates = [of(case).tokens_per_second for case in found.cases]
        assert rates == sorted(rates)


def test_auto_is_never_slower_than_none() -> None:
    found = told(asked("auto"))
    assert min(case.planned.speed_up for case in found.cases) >= 1


def test_what_was_measured_is_the_only_case() -> None:
    request = asked("selfPrecision")
    found = told(request, measured(request))
    assert found.measured
    assert only(found).acceptance == COUNTS.acceptance
    assert found.source == "measured over 3,600 drafted tokens on this machine, 2026-11-20"


def test_of_look_ups_the_steps_without_a_guess_count_too() -> None:
    request = asked("ngram")
    often, seldom = (
        only(told(request, measured(request, DraftCounts(1000, 3600, 2500, tokens)))).one_stream.speed_up
        for tokens in (3500, 20_000)
    )
    assert 1 < seldom < often


def test_of_look_ups_no_more_tokens_are_tried_than_were_wished() -> None:
    found = told(asked("suffix", tokens=2)).cases[-1]
    assert found.one_stream.best_tokens == 2
    assert told(asked("selfPrecision", tokens=2)).cases[-1].one_stream.best_tokens > 2


def test_a_plan_with_it_is_read_again_and_one_without_too() -> None:
    request = asked("selfPrecision")
    plan = make_plan(request).plan
    whole = with_forecast(plan, request)
    assert Plan.decode(whole.encode()) == whole
    assert Plan.decode(plan.encode()) == plan
    assert b"tokensPerSecond" in plan.encode()
    assert b"speculation" not in msgspec.json.encode(plan.prediction)  # an earlier release reads it too


ASSUMED_TEXT = """\
speculation selfPrecision, 4 tokens: how many drafts are right is assumed, and the figures above are without it
  if 60% are: one stream x 0.85 (1.148 instead of 1.357 tokens/s): it does not pay, most with 1 token (x 1.12)
    4 in flight x 0.47 (1.376 instead of 2.47 tokens/s): it does not pay with any number of tokens
  if 80% are: one stream x 1.23 (1.674 instead of 1.357 tokens/s): it pays, most with 2 tokens (x 1.31)
    4 in flight x 0.64 (1.766 instead of 2.47 tokens/s): it does not pay with any number of tokens
  if 95% are: one stream x 1.66 (2.253 instead of 1.357 tokens/s): it pays, most with 5 tokens (x 1.67)
    4 in flight x 0.81 (2.108 instead of 2.47 tokens/s): it does not pay with any number of tokens
  `strata up` with this deployment measures how many are, and keeps it for the next plan"""
MEASURED_TEXT = """\
speculation suffix, 4 tokens: a draft is right in 85% of cases, and 40% of steps have drafts (measured over 3,600 drafted tokens on this machine, 2026-11-20)
  one stream: x 2.00 (2.708 instead of 1.357 tokens/s): it pays, most with 4 tokens
  4 in flight: x 1.10 (2.634 instead of 2.47 tokens/s): it pays, most with 1 token (x 1.16)
  the figures above are without it"""


@pytest.mark.parametrize(
    ("mode", "is_measured", "text"), [("selfPrecision", False, ASSUMED_TEXT), ("suffix", True, MEASURED_TEXT)]
)
def test_it_is_told(mode: SpeculationMode, is_measured: bool, text: str) -> None:  # noqa: FBT001  a case of the table
    request = asked(mode)
    plan = with_forecast(make_plan(request).plan, request, measured(request) if is_measured else None)
    assert "\n".join(forecast_lines(plan)) == text
