"""The figures of an outcome, from a handful of requests whose moments are known."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.simulate import Outcome, ReplicaUse, Request, Served
from strata_planner.simulate.outcome import percentile

QUICK = Served(Request(1.0, 8, 5), 0, 2.0, 4.0, 5)  # ttft 1, tpot 0.5, latency 3
SLOW = Served(Request(2.0, 8, 3), 0, 6.0, 8.0, 3)  # ttft 4, tpot 1, latency 6
SHORT = Served(Request(3.0, 8, 1), 0, 5.0, 5.0, 1)  # ttft 2, no tpot, latency 2
REFUSED = Served(Request(3.0, 800, 1), None, None, None, 0)
CUT = Served(Request(7.0, 8, 9), 0, 9.0, None, 2)
OUTCOME = Outcome((QUICK, SLOW, SHORT, REFUSED, CUT), (ReplicaUse(4, 9, (5.0, 2.5), 0.5, 0),), 10.0)


def test_rates_count_what_came_out() -> None:
    assert OUTCOME.tokens_per_second == pytest.approx(11 / 10)
    assert OUTCOME.requests_per_second == pytest.approx(3 / 10)
    assert OUTCOME.utilisation == ((0.5, 0.25),)


def test_attainment_counts_every_request() -> None:
    assert OUTCOME.attainment(ttft_seconds=2, tpot_seconds=0.5) == 2 / 5
    assert OUTCOME.attainment(ttft_seconds=4, tpot_seconds=1) == 3 / 5
    assert OUTCOME.attainment_of_latency(3) == 2 / 5
    assert OUTCOME.goodput(ttft_seconds=2, tpot_seconds=0.5) == pytest.approx(2 / 10)


def test_percentiles_leave_out_what_did_not_come_to_pass() -> None:
    assert OUTCOME.values("ttft") == (1.0, 2.0, 2.0, 4.0)
    assert OUTCOME.values("tpot") == (0.5, 1.0)
    assert OUTCOME.percentile("latency", 50) == 3.0
    assert OUTCOME.percentile("tpot", 50) == pytest.approx(0.75)
    assert OUTCOME.mean("latency") == pytest.approx(11 / 3)


def test_an_empty_outcome_has_figures_too() -> None:
    empty = Outcome((), (), 0.0)
    assert (empty.tokens_per_second, empty.attainment(1, 1), empty.percentile("ttft", 50)) == (0.0, 0.0, None)


def test_json_is_plain() -> None:
    plain = json.loads(json.dumps(OUTCOME.as_json()))
    assert (plain["requests"], plain["finished"], plain["refused"]) == (5, 3, 1)
    assert plain["ttftSeconds"]["p50"] == 2.0
    assert plain["replicas"][0] == {
        "requests": 4,
        "steps": 9,
        "kvPeak": 0.5,
        "preemptions": 0,
        "utilisation": [0.5, 0.25],
    }


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_among_the_values(values: list[float], percent: float) -> None:
    values.sort()
    found = percentile(values, percent)
    assert values[0] - 1e-9 <= found <= values[-1] + 1e-9
    assert percentile(values, 0) == values[0]
    assert percentile(values, 100) == values[-1]
