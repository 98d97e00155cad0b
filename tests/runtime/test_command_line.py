"""Numbers of command lines: what is none is refused with the value, the rule and the fix."""

from argparse import ArgumentTypeError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.command_line import LEAST_WINDOW, natural, positive, window_tokens


@given(st.integers(0, 1 << 70))
def test_a_whole_number_is_taken_as_it_is(number: int) -> None:
    assert natural(str(number)) == number
    if number:
        assert positive(str(number)) == number
    if number >= LEAST_WINDOW:
        assert window_tokens(str(number)) == number


@pytest.mark.parametrize("text", ["", "-1", "1.5", "one", " 1", "٣", "²", "0x1"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    for kind in (natural, positive, window_tokens):
        with pytest.raises(ArgumentTypeError, match=r"is not a whole number of at least \d: use \d or more"):
            kind(text)


def test_what_is_too_few_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="use 1 or more"):
        positive("0")
    with pytest.raises(ArgumentTypeError, match=f"at least {LEAST_WINDOW} tokens"):
        window_tokens(str(LEAST_WINDOW - 1))
