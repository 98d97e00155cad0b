"""Laws of a linear of any precision: its bytes are counted, fewer planes are a coarser model, planes go and come back."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import ANY_PRECISION, stored_bytes
from strata_runtime.formats import PrecisionError, stored_bytes_of
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.formats.weights import PlanesWeight
from tests.laws import share

torch.set_num_threads(1)


def a_planes_weight(out_features: int, in_features: int, bits: int, dtype: torch.dtype = torch.float32) -> PlanesWeight:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8, generator=generator)
    table = torch.randn(out_features, 1 << bits, generator=generator).sort(dim=1).values
    return PlanesWeight(pack_planes(codes, bits), table.to(dtype), in_features)


@given(out_features=st.integers(1, 40), in_features=st.integers(1, 700), bits=st.sampled_from(sorted(ANY_PRECISION)))
@settings(max_examples=share(40), deadline=None)
def test_it_multiplies_by_its_centroids_and_keeps_the_bytes_that_are_counted(
    out_features: int, in_features: int, bits: int
) -> None:
    weight = a_planes_weight(out_features, in_features, bits)
    linear = AnyLinear(weight, None)
    tokens = torch.randn(3, in_features, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(linear(tokens), tokens @ weight.dequantized().t(), rtol=1e-5, atol=1e-4)
    assert stored_bytes_of(linear) == stored_bytes(ANY_PRECISION[bits], out_features, in_features, "float32")


@pytest.mark.parametrize("fewer", [3, 4, 7])
def test_planes_go_and_come_back(fewer: int) -> None:
    whole, coarse = a_planes_weight(16, 600, 8), a_planes_weight(16, 600, fewer)
    linear, tokens = AnyLinear(whole, None), torch.randn(2, 600)
    before = linear(tokens)
    linear.set_bits(fewer, coarse.table)
    kept = PlanesWeight(whole.planes[:fewer], coarse.table, 600)
    assert linear.format == ANY_PRECISION[fewer]
    assert torch.equal(linear.dequantized(), kept.dequantized())
    linear.set_bits(8, whole.table, whole.planes[fewer:])
    assert torch.equal(linear(tokens), before)


def test_what_is_let_go_is_memory_of_its_own() -> None:
    whole = a_planes_weight(16, 600, 8)
    together = torch.stack(whole.planes)  # as one read of a file gives them
    linear = AnyLinear(PlanesWeight(tuple(together), whole.table, 600), None)
    places = {plane.untyped_storage().data_ptr() for plane in linear.stored.planes}
    assert len(places) == 8
    assert together.untyped_storage().data_ptr() not in places
    kept = linear.stored.planes[:4]
    linear.set_bits(4, a_planes_weight(16, 600, 4).table)
    assert all(one is other for one, other in zip(linear.stored.planes, kept, strict=True))


@pytest.mark.parametrize(
    ("bits", "table_bits", "missing"), [(3, 4, 0), (8, 8, 0), (8, 8, 3), (5, 5, 2), (4, 4, 1)], ids=str
)
def test_planes_and_tables_that_do_not_fit_change_nothing(bits: int, table_bits: int, missing: int) -> None:
    linear = AnyLinear(a_planes_weight(16, 600, 4), None)
    before, parent = linear.dequantized(), a_planes_weight(16, 600, 8)
    with pytest.raises(PrecisionError):
        linear.set_bits(bits, a_planes_weight(16, 600, table_bits).table, parent.planes[4 : 4 + missing])
    with pytest.raises(PrecisionError):
        linear.set_bits(3, a_planes_weight(16, 600, 3).table.bfloat16())
    assert torch.equal(linear.dequantized(), before)


def test_a_copy_multiplies_by_memory_of_its_own() -> None:
    linear, tokens = AnyLinear(a_planes_weight(32, 128, 4), None), torch.randn(3, 128)
    expected, other = linear(tokens), copy.deepcopy(linear)
    for buffer in linear.buffers():
        buffer.zero_()
    assert torch.equal(other(tokens), expected)
    assert not linear(tokens).any()
