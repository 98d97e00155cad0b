"""Stop strings: the same cut however the text comes in pieces."""

from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.gateway.text.stop_strings import StopStrings

texts = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def expected(text: str, stop_strings: list[str]) -> str:
    """Cut by definition: at the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stop_strings if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(deadline=None)  # the machine may be busy
@given(st.lists(texts, max_size=6), stops)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stop_strings: list[str]) -> None:
    screen = StopStrings(stop_strings)
    shown, stopped = "", False
    for piece in pieces:
        screened = screen.push(piece)
        shown += screened.text
        stopped = screened.stopped
        if stopped:
            break
    shown += "" if stopped else screen.flush()
    assert shown == expected("".join(pieces), stop_strings)


@settings(deadline=None)  # the machine may be busy
@given(texts, stops)
def test_nothing_is_shown_that_may_have_to_be_taken_back(text: str, stop_strings: list[str]) -> None:
    screen = StopStrings(stop_strings)
    shown = ""
    for character in text:
        screened = screen.push(character)
        shown += screened.text
        assert expected(text, stop_strings).startswith(shown)
        if screened.stopped:
            return


def test_text_that_cannot_become_a_stop_string_is_shown_at_once() -> None:
    screen = StopStrings(["\n\n"])
    assert screen.push("one\n").text == "one"
    assert screen.push("two").text == "\ntwo"
