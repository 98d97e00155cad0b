"""Where JSON values end, whatever follows and however they come."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.gateway.text.json_scanner import JsonScanner

texts = st.text('ab"\\{}[],:\n\u1234', max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@settings(deadline=None)  # the machine may be busy
@given(values, st.sampled_from([None, 2]), st.sampled_from([",", "}", "\n", "</tool_call>", ' "', ""]))
def test_a_value_ends_where_it_ends(value: Any, indent: int | None, behind: str) -> None:
    text = json.dumps(value, indent=indent)
    for pieces in ([text + behind], list(text + behind)):
        scanner, scanned = JsonScanner(), 0
        for piece in pieces:
            scanned += scanner.scan(piece, 0)
        assert scanned == len(text)
        assert not scanner.malformed
        assert scanner.complete or not behind


@pytest.mark.parametrize(
    ("valid", "rest"), [("", "'a'"), ('{"a": ', "'b'}"), ("[1", "}"), ('{"a": [{', "]"), ('{"a": 1', "</tool_call>")]
)
def test_what_is_no_json_is_told_where_it_is_not(valid: str, rest: str) -> None:
    scanner = JsonScanner()
    assert scanner.scan(valid + rest, 0) == len(valid)
    assert scanner.malformed
    assert not scanner.complete


def test_the_rest_of_an_object() -> None:
    scanner = JsonScanner(opened="{")
    assert scanner.scan(', "b": {}} more', 0) == len(', "b": {}}')
    assert scanner.complete
