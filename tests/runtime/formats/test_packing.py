"""Packing loses nothing, wastes nothing, and lies as torch's int4 kernel wants it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats import features, packing
from tests.laws import share

torch.set_num_threads(1)
ROWS = st.integers(1, 200)
COLUMNS = st.integers(1, 8).map(lambda groups: 32 * groups)


def some_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)


@given(rows=ROWS, columns=COLUMNS)
@settings(max_examples=share(60), deadline=None)
def test_nibbles_come_back(rows: int, columns: int) -> None:
    codes = some_codes(rows, columns, bits=4)
    for part in packing.segments(rows):
        chosen = codes[part.start : part.stop]
        nibbles = packing.pack_segment(chosen, part)
        assert nibbles.nbytes * 2 == chosen.numel()
        assert torch.equal(packing.unpack_segment(nibbles, part, columns), chosen)


@given(rows=ROWS, columns=COLUMNS)
@settings(max_examples=share(60), deadline=None)
def test_planes_of_three_bits_come_back(rows: int, columns: int) -> None:
    codes = some_codes(rows, columns, bits=3)
    for part in packing.segments(rows):
        nibbles = packing.pack_segment(codes[part.start : part.stop], part)
        two, one = packing.split_planes(nibbles, part.blocks)
        assert (two.nbytes + one.nbytes) * 4 == nibbles.nbytes * 3
        assert torch.equal(packing.join_planes(two, one, part.blocks), nibbles)


@given(rows=st.integers(1, 2000), columns=COLUMNS, at_a_time=st.integers(1, 100_000))
def test_pieces_cut_segments_at_blocks(rows: int, columns: int, at_a_time: int) -> None:
    parts = list(packing.pieces(rows, columns, at_a_time))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == rows
    assert all(part.blocks == 1 or part.blocks * part.rows * columns <= at_a_time for part in parts)
    ends = [packing.byte_range(part, columns, bits=3).stop for part in parts]
    assert ends[-1] * 8 == rows * columns * 3


@given(rows=ROWS)
def test_segments_cover_every_row_once_in_order(rows: int) -> None:
    parts = list(packing.segments(rows))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == rows


@pytest.mark.parametrize("rows", [16, 48, 64, 80, 192])
def test_the_layout_is_the_one_that_torch_packs(rows: int) -> None:
    if not features.int4pack_on_cpu():
        pytest.skip("this processor packs int4 in another order; the kernel is not offered here")
    codes = some_codes(rows, 64, bits=4)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    ours = [packing.pack_segment(codes[part.start : part.stop], part) for part in packing.segments(rows)]
    assert torch.equal(theirs.flatten(), torch.cat(ours))
