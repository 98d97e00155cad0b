"""Frames come back as they were sent; one of another layout is not taken for one of ours."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.frames import FrameHeader, Free, Open, Sampling, Segment, data_decoder, encode

NUMBERS = st.integers(0, 1 << 40)


@given(
    segments=st.lists(
        st.builds(Segment, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=3).map(tuple)), max_size=4
    ),
    operations=st.lists(
        st.builds(Open, NUMBERS, st.builds(Sampling), root=st.binary(max_size=16)) | st.builds(Free, NUMBERS),
        max_size=4,
    ),
    tokens=st.lists(NUMBERS, max_size=4),
)
def test_a_frame_comes_back_as_it_was_sent(
    segments: list[Segment], operations: list[Open | Free], tokens: list[int]
) -> None:
    header = FrameHeader(0, 1, 2, "", segments, [*operations], "bfloat16", 64, tokens=tokens)
    assert data_decoder.decode(encode(header)) == header


def test_a_frame_of_the_first_layout_is_refused() -> None:
    """There a segment had a fifth field before `sample`."""
    first = ["frame", 0, 1, 2, "", [[0, 0, 1, 0, 1]], [], "bfloat16", 64]
    with pytest.raises(msgspec.ValidationError, match="frame"):
        data_decoder.decode(msgspec.msgpack.encode(first))
