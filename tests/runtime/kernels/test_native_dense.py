"""Products with packed 16-bit weights: those of the weight itself, for any shape, and the same for a token whatever stands beside it."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.kernels import native_dense
from strata_runtime.kernels.native_dense import PackedProduct, PackedWeight, pack
from tests.runtime.kernels.levels import EACH_LEVEL, laws

CPU = torch.device("cpu")
pytestmark = EACH_LEVEL


def dense_linear(tokens: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return PackedProduct(weight, bias)(tokens)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@laws(60)
@given(
    st.integers(1, 100),
    st.integers(1, 700),
    st.integers(1, 40),
    st.sampled_from([0, 1]),
    st.integers(1, 2),
    st.integers(0, 9),
)
def test_products_are_those_of_the_weight(
    rows: int, columns: int, count: int, biases: int, threads: int, seed: int
) -> None:
    weight, tokens = drawn(seed, rows, columns), drawn(seed + 1, count, columns)
    bias = drawn(seed + 2, rows) if biases else None
    expected = tokens.double() @ weight.double().T + (0 if bias is None else bias.double())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = dense_linear(tokens, pack(weight), bias)
    finally:
        torch.set_num_threads(before)
    size = (tokens.double().abs() @ weight.double().abs().T) + 1
    assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * size).all()


@laws(60)
@given(st.integers(1, 100), st.integers(1, 700), st.integers(1, 40), st.sampled_from([0, 1]), st.integers(0, 9))
def test_products_of_8_bits_are_those_of_codes_times_scales(
    rows: int, columns: int, count: int, biases: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scales, tokens = drawn(seed + 1, rows).abs(), drawn(seed + 2, count, columns)
    bias = drawn(seed + 3, rows) if biases else None
    exact = tokens.double() @ codes.double().T * scales.double() + (0 if bias is None else bias.double())
    found = dense_linear(tokens, pack(codes, scales), bias)
    size = tokens.double().abs() @ codes.double().abs().T * scales.double() + 1
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * size).all()
    assert torch.equal(native_dense.rows(pack(codes, scales), torch.arange(rows)), codes)


@laws(30)
@given(st.integers(1, 90), st.integers(1, 1200), st.integers(2, 300), st.data())
def test_what_a_token_gets_does_not_depend_on_those_beside_it(
    rows: int, columns: int, count: int, data: st.DataObject
) -> None:
    weight, tokens = pack(drawn(0, rows, columns)), drawn(1, count, columns)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    assert torch.equal(dense_linear(tokens, weight)[start:stop], dense_linear(tokens[start:stop], weight))


def test_a_token_that_is_not_finite_reaches_itself_alone() -> None:
    weight, tokens = pack(drawn(0, 33, 65)), drawn(1, 9, 65)
    expected = dense_linear(tokens, weight)
    tokens[4, 7] = torch.nan
    found = dense_linear(tokens, weight)
    assert found[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(found[others], expected[others])


def test_views_are_read_where_they_lie() -> None:
    wide, tokens = drawn(0, 64, 200), drawn(1, 7, 200)
    weight, part = wide[3:50, 10:131], tokens[:, 10:131]
    assert torch.equal(dense_linear(part, pack(weight)), dense_linear(part.contiguous(), pack(weight.contiguous())))
    across = drawn(2, 121, 5).T
    assert torch.equal(dense_linear(across, pack(weight)), dense_linear(across.contiguous(), pack(weight)))


def test_no_tokens_are_no_products() -> None:
    assert dense_linear(drawn(0, 0, 64), pack(drawn(1, 32, 64))).shape == (0, 32)


@pytest.mark.parametrize("tokens", [drawn(0, 3, 63), drawn(0, 3, 64).float()], ids=["width", "type"])
def test_tokens_that_do_not_fit_are_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be bfloat16 \[\.\.\., 64\]"):
        dense_linear(tokens, pack(drawn(1, 32, 64)))


def test_a_copy_has_memory_of_its_own() -> None:
    tokens, weight = drawn(0, 3, 64), pack(drawn(1, 32, 64))
    product = PackedProduct(weight, drawn(2, 32))
    expected, other = product(tokens), copy.deepcopy(product)
    weight.values.zero_()
    assert torch.equal(other(tokens), expected)
    assert not torch.equal(product(tokens), expected)


@laws(40)
@given(st.integers(1, 100), st.integers(1, 700), st.integers(1, 40), st.sampled_from(list(COMPUTE_DTYPES.values())))
def test_a_weight_that_is_used_once(rows: int, columns: int, count: int, dtype: torch.dtype) -> None:
    """However it is multiplied, and whether it lies row by row or column by column."""
    tokens, weight = (drawn(seed, *shape).to(dtype) for seed, shape in ((0, (count, columns)), (1, (rows, columns))))
    for each in (weight, weight.t().contiguous().t()):
        found = native_dense.multiply_once(tokens, each)
        assert found.dtype is dtype
        torch.testing.assert_close(
            found.double(), tokens.double() @ weight.double().t(), rtol=2**-7, atol=1e-3 * columns**0.5
        )


@pytest.mark.parametrize(
    ("avx512", "onednn", "tiles", "taken"),
    [
        (True, True, False, True),
        (True, True, True, False),
        (False, True, False, False),  # AVX-512 without BF16: oneDNN's are wider
        (False, False, False, True),  # AVX2 alone
    ],
)
def test_linears_take_what_is_the_fastest(
    *, avx512: bool, onednn: bool, tiles: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_dense, "multiplies_in_avx512", lambda: avx512)
    monkeypatch.setattr(native_dense, "onednn_multiplies", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert native_dense.takes(torch.bfloat16, CPU) is taken
    assert not native_dense.takes(torch.float16, CPU)
