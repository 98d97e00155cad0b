"""Traces: Poisson arrivals by rate and seed, files of the Azure format, requests at once and at another rate."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from strata_planner.errors import WorkloadError
from strata_planner.simulate import Request, at_once, azure, of_clients, poisson, scaled, spread

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
2023-11-16 18:15:48.6805900,91,16
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "trace.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_becomes_requests_from_second_0_on(tmp_path: Path) -> None:
    file = written(tmp_path, CSV)
    assert azure(file) == (Request(0.0, 374, 44), Request(2.0, 91, 16), Request(4.25, 396, 109))
    assert azure(file, limit=2) == (Request(0.0, 374, 44), Request(4.25, 396, 109))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns TIMESTAMP, ContextTokens, GeneratedTokens are missing"),
        ("TIMESTAMP,ContextTokens\n", "columns GeneratedTokens are missing"),
        (CSV.splitlines()[0], "holds no requests"),
        (CSV.replace("396", "many"), "line 3: invalid literal"),
        (CSV.replace("396", "0"), "line 3: 0 and 109 tokens"),
        (CSV + "yesterday,1,1\n", "line 5: Invalid isoformat"),
        (CSV + "2023-11-16 18:15:48\n", "line 5"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        azure(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="name a csv file that can be read"):
        azure(tmp_path / "none.csv")


def test_poisson_arrivals_come_at_the_rate() -> None:
    trace = poisson(4.0, 4000, [10, 30], 5, seed=3)
    assert trace[-1].arrival_seconds == pytest.approx(1000, rel=0.05)
    gaps = [b.arrival_seconds - a.arrival_seconds for a, b in pairwise(trace)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    assert {each.prompt_tokens for each in trace} == {10, 30}
    assert {each.output_tokens for each in trace} == {5}


def test_another_rate_moves_the_same_requests() -> None:
    one, two = poisson(1.0, 50, [10, 30], [5, 6], seed=3), poisson(2.0, 50, [10, 30], [5, 6], seed=3)
    for a, b in zip(one, two, strict=True):
        assert a.arrival_seconds == pytest.approx(2 * b.arrival_seconds)
        assert a[1:] == b[1:]


def test_scaling_keeps_the_order_and_sets_the_rate() -> None:
    trace = scaled(poisson(1.0, 50, 10, 5, seed=3), rate=5.0)
    assert len(trace) / trace[-1].arrival_seconds == pytest.approx(5.0)
    assert {each.arrival_seconds for each in at_once(trace)} == {0.0}


@pytest.mark.parametrize(
    "call",
    [
        lambda: poisson(0, 1, 1, 1, seed=0),
        lambda: poisson(1, 0, 1, 1, seed=0),
        lambda: poisson(1, 1, 0, 1, seed=0),
        lambda: poisson(1, 1, 1, [], seed=0),
        lambda: scaled([], rate=0),
    ],
)
def test_impossible_traces_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(WorkloadError, match=r"at least 1|above 0"):
        call()


@pytest.mark.parametrize(("mean", "deviation"), [(100, 20), (512, 512), (4096, 2000), (1, 0.1)])
def test_lengths_are_spread_as_they_are_said_to_be(mean: int, deviation: float) -> None:
    lengths = spread(mean, deviation)
    assert min(lengths) >= 1
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(lengths) == pytest.approx(deviation, rel=0.06, abs=0.2)
    assert spread(mean, deviation) == lengths


def test_of_lengths_that_nobody_says_more_of_some_are_half_and_some_one_and_a_half() -> None:
    assert spread(100, 0.0) == range(50, 151)
    given = of_clients(4, 50, spread(100, 0.0), spread(32, 0.0), 7, 1000)
    assert given == of_clients(4, 50, 100, 32, 7, 1000)


def test_no_request_of_a_client_is_longer_than_a_sequence_may_be() -> None:
    unlike = of_clients(4, 200, spread(100, 300.0), spread(50, 90.0), 7, 160)
    assert max(each.prompt_tokens + each.output_tokens for each in unlike) <= 160
    assert min(min(each.prompt_tokens, each.output_tokens) for each in unlike) >= 1
