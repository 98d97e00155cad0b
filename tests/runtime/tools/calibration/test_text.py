"""Windows of a text: whole, apart, and as many as asked for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.errors import InputError
from strata_runtime.tools.calibration.text import cut, split

DOCUMENTS = st.lists(st.lists(st.integers(3, 90), max_size=200), min_size=1, max_size=6)


@given(documents=DOCUMENTS, window=st.integers(32, 64), first=st.sampled_from([[], [1]]))
def test_windows_start_anew_and_reach_over_no_document(
    documents: list[list[int]], window: int, first: list[int]
) -> None:
    pieces = cut(documents, first, window)
    longest = max(len(document) for document in documents) + len(first)
    assert all(piece[: len(first)].tolist() == first for piece in pieces)
    if longest >= window:
        assert {len(piece) for piece in pieces} == {window}
    for piece in pieces:
        body = piece[len(first) :].tolist()
        assert any(body == document[at : at + len(body)] for document in documents for at in range(len(document)))


@given(count=st.integers(2, 40), tokens=st.integers(1, 2000), held_back=st.integers(1, 2000))
def test_no_window_is_on_both_sides(count: int, tokens: int, held_back: int) -> None:
    windows = [torch.full((32,), index) for index in range(count)]
    found = split(windows, "text", tokens, held_back)
    seen = {int(window[0]) for window in found.calibration}
    kept = {int(window[0]) for window in found.held_back}
    assert seen
    assert kept
    assert not seen & kept
    assert len(seen) <= max(1, tokens // 32)
    assert len(kept) <= max(1, held_back // 32)


def test_nothing_is_held_back_unless_asked_for() -> None:
    found = split([torch.zeros(32)] * 4, "text", 64, 0)
    assert (len(found.calibration), found.held_back) == (2, ())


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(InputError, match="fewer than 16 tokens"):
        split(cut([[5] * 15], [], 32), "note.txt", 100, 100)
    with pytest.raises(InputError, match=r"fills one window.*--held-back-tokens 0"):
        split(cut([[5] * 40], [], 32), "note.txt", 100, 100)
