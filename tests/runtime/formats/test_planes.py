"""Laws of bit-planes: what goes in comes out, fewer planes are the most significant bits, tiles can be cut apart."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats.planes.planes import TILE_COLUMNS, pack_planes, unpack_planes
from tests.laws import share

torch.set_num_threads(1)


def some_codes(out_features: int, in_features: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8, generator=generator)


@given(out_features=st.integers(1, 9), in_features=st.integers(1, 1300), bits=st.integers(1, 8))
@settings(max_examples=share(60), deadline=None)
def test_planes_hold_the_codes(out_features: int, in_features: int, bits: int) -> None:
    codes = some_codes(out_features, in_features, bits)
    planes = pack_planes(codes, bits)
    assert torch.equal(unpack_planes(planes, in_features), codes)
    for fewer in range(1, bits):
        assert torch.equal(unpack_planes(planes[:fewer], in_features), codes >> (bits - fewer))


def test_columns_of_a_byte_are_an_eighth_of_the_tile_apart() -> None:
    codes = torch.zeros(1, TILE_COLUMNS, dtype=torch.uint8)
    codes[0, 3 * TILE_COLUMNS // 8 + 5] = 1
    (plane,) = pack_planes(codes, 1)
    assert plane.nonzero().tolist() == [[0, 5]]
    assert plane[0, 5] == 1 << 3


def test_tiles_can_be_cut_apart() -> None:
    codes = some_codes(4, 3 * TILE_COLUMNS, 4)
    cut = [plane[:, TILE_COLUMNS // 8 : 2 * TILE_COLUMNS // 8] for plane in pack_planes(codes, 4)]
    assert torch.equal(unpack_planes(cut, TILE_COLUMNS), codes[:, TILE_COLUMNS : 2 * TILE_COLUMNS])
