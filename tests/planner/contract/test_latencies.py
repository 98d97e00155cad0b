"""The latency profile as a file: what is refused, and why."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName
from strata_planner.contract.latencies import LatencyProfile, row_sizes
from strata_planner.contract.rows import padded_rows
from strata_planner.contract.values import ContractError
from tests.laws import share
from tests.planner.latency_profiles import ROW_MULTIPLE, ROW_SIZES, a_latency_profile, rows_of

NAMES: st.SearchStrategy[FormatName] = st.sampled_from(["dense", "int4", "any3", "any4", "any4_a8", "w8a8"])


def test_a_profile_comes_back_as_it_was_written() -> None:
    profile = a_latency_profile()
    assert LatencyProfile.decode(profile.encode()) == profile


@settings(deadline=None, max_examples=share(20))  # a busy machine is no failure
@given(kept=st.sets(NAMES, min_size=1), added=st.sets(NAMES, min_size=1))
def test_formats_that_are_added_leave_every_byte_of_the_others(kept: set[FormatName], added: set[FormatName]) -> None:
    earlier, more = a_latency_profile(formats=sorted(kept)), a_latency_profile(formats=sorted(added - kept), head=())
    whole = earlier.with_formats(more)
    assert whole.layers.keys() == kept | added
    assert whole.of(kept).encode() == earlier.encode()
    whole.check()
    rest = whole.without(kept)
    assert (rest is None) is (added <= kept)
    if rest is not None:
        assert rest.encode() == more.encode()  # what a step takes beside its layers is measured again too


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
        (changed(("version",), 7), "version 7; this release reads version 2: run `strata profile` again"),
        (a_latency_profile().encode()[:-100].decode(), "not a valid"),
        ("{}", "version"),
        (changed(("points",), []), "no points"),
        (changed(("layers", "any4"), 3), "do not name the same formats .any4.: run `strata profile`"),
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
        "a-format-without-points",
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
    sizes, multiple = row_sizes([padded_rows(count) for count in range(1, 1025)])
    as_the_runtime = msgspec.structs.replace(a_latency_profile(), row_sizes=sizes, row_multiple=multiple)
    assert all(as_the_runtime.rows(count) == padded_rows(count) for count in range(1, 3000))
    unpadded = msgspec.structs.replace(a_latency_profile(), row_sizes=(), row_multiple=1)
    assert unpadded.rows(77) == 77
