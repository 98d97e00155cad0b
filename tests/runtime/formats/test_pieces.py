"""Products in pieces are the product, whatever fits at a time; pieces of many rows are whole tiles; sums of the vendor's library stay in float32."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.formats.pieces import multiply_in_pieces
from strata_runtime.formats.vendor_sums import add_in_float32

SIZES = st.integers(1, 900)


@given(out_features=SIZES, in_features=st.integers(1, 9), at_a_time=st.integers(1, 5000))
def test_pieces_give_the_product_and_begin_at_whole_tiles(out_features: int, in_features: int, at_a_time: int) -> None:
    weight = torch.arange(out_features * in_features, dtype=torch.float32).reshape(out_features, in_features) % 7
    tokens = torch.ones(2, in_features)
    starts: list[int] = []

    def rows(start: int, stop: int) -> torch.Tensor:
        starts.append(start)
        assert (stop - start) * in_features <= max(at_a_time, in_features)
        return weight[start:stop]

    found = multiply_in_pieces(tokens, (out_features, in_features), at_a_time, rows)
    assert torch.equal(found, tokens @ weight.t())
    if at_a_time // in_features > 256:
        assert all(start % 256 == 0 for start in starts)


@pytest.fixture
def allowed() -> Iterator[None]:
    """As torch begins."""
    products = torch.backends.cuda.matmul

    def allow() -> None:
        products.allow_fp16_reduced_precision_reduction = products.allow_bf16_reduced_precision_reduction = True

    allow()
    yield
    allow()


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("device", "stays"), [("cuda", False), ("cpu", True)])
def test_a_gpu_is_told_to_add_in_float32(device: str, stays: bool) -> None:  # noqa: FBT001
    add_in_float32(torch.device(device))
    products = torch.backends.cuda.matmul
    assert bool(products.allow_fp16_reduced_precision_reduction) is stays
    assert bool(products.allow_bf16_reduced_precision_reduction) is stays
