"""The latency profile as a file: what is refused, and why."""

import json
from typing import Any

import msgspec
import pytest

from strata_planner.contract.latencies import LatencyProfile, row_sizes
from strata_planner.contract.values import ContractError
from tests.planner.latency_profiles import ROW_MULTIPLE, ROW_SIZES, a_latency_profile, rows_of


def test_a_profile_comes_back_as_it_was_written() -> None:
    profile = a_latency_profile()
    assert LatencyProfile.decode(profile.encode()) == profile


def changed(path: tuple[str | int, ...], value: Any) -> str:
    told: Any = json.loads(a_latency_profile().encode())
    place = told
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(told)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed(("version",), 7), "version 7; this release reads version 1: run `strata profile` again"),
        (a_latency_profile().encode()[:-100].decode(), "not a valid"),
        ("{}", "version"),
        (changed(("points",), []), "no points"),
        (changed(("points", 0, "layerSeconds"), -1), "must be positive"),
        (changed(("points", 0, "sequences"), 0), "must be positive"),
        (changed(("points", 0, "phase"), "both"), "phase"),
        (changed(("rowSizes",), [4, 2]), "increasing"),
        (changed(("model", "surprise"), 1), "surprise"),
    ],
    ids=[
        "version",
        "truncated",
        "empty",
        "no-points",
        "negative",
        "no-sequences",
        "phase",
        "row-sizes",
        "unknown-field",
    ],
)
def test_a_profile_that_cannot_be_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(ContractError, match=says):
        LatencyProfile.decode(text)


@pytest.mark.parametrize("tokens", [1, 3, 5, 100, 128, 129, 600, 2048])
def test_steps_are_padded_as_measured(tokens: int) -> None:
    assert a_latency_profile().rows(tokens) == rows_of(tokens)


def test_row_sizes_are_told_from_what_tokens_are_padded_to() -> None:
    assert row_sizes([rows_of(count) for count in range(1, 257)]) == (ROW_SIZES, ROW_MULTIPLE)
    assert row_sizes(range(1, 257)) == ((), 1)
    unpadded = msgspec.structs.replace(a_latency_profile(), row_sizes=(), row_multiple=1)
    assert unpadded.rows(77) == 77
