"""A slot's tables of pages: what the leader said, or an error by name that changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.errors import StepError
from strata_runtime.model.kv.pages import PageTables

PAGES, SIZE = 6, 4
APPENDED = st.tuples(st.integers(0, 3), st.lists(st.integers(-1, PAGES), max_size=3), st.integers(-1, 30))


@given(st.lists(APPENDED | st.integers(0, 3), max_size=12))
def test_tables_are_what_was_appended(said: list[tuple[int, list[int], int] | int]) -> None:
    tables = PageTables(PAGES, SIZE)
    expected: dict[int, list[int]] = {}
    for each in said:
        if isinstance(each, int):
            tables.free(each)
            expected.pop(each, None)
            continue
        sequence, appended, end = each
        table = [*expected.get(sequence, []), *appended]
        possible = all(0 <= page < PAGES for page in appended) and len(table) <= PAGES
        if possible and 0 < end <= len(table) * SIZE:
            assert tables.extend(sequence, appended, end) == table
            expected[sequence] = table
        else:
            with pytest.raises(StepError, match=f"sequence {sequence}"):
                tables.extend(sequence, appended, end)
    assert {sequence: tables.extend(sequence, [], 1) for sequence in tables.sequences} == expected


@pytest.mark.parametrize(
    ("appended", "end", "reason"),
    [
        ([0, 6], 8, "was given page 6; this slot has pages 0..5"),
        ([0], 5, "ends at position 5 and its table has 1 pages of 4 tokens"),
        ([0, 1, 2, 3, 4, 5, 0], 5, "at most once"),
    ],
)
def test_a_refusal_names_the_value_and_the_rule(appended: list[int], end: int, reason: str) -> None:
    with pytest.raises(StepError, match=reason):
        PageTables(PAGES, SIZE).extend(7, appended, end)
