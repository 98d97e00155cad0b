"""Laws of eight-bit floats: nearest values, saturation, exact decoding, products as the reference defines them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName, block_float8_bytes
from strata_runtime.formats import features, make_linear, stored_bytes_of
from strata_runtime.formats.float8 import float8_kernels
from strata_runtime.formats.float8.block_linear import BlockFloat8Linear
from strata_runtime.formats.float8.blocks import checked_blocks
from strata_runtime.formats.float8.float8 import E4M3, FLOAT8, LARGEST, decode, quantize_float8
from strata_runtime.formats.float8.float8_linear import Float8Linear
from strata_runtime.formats.kernels import FLOAT8_KERNELS, select
from tests.laws import share
from tests.runtime.loading.float8_models import rounded_in_blocks

torch.set_num_threads(1)
FRACTION_BITS, LEAST_EXPONENT = 3, -6  # of e4m3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Weights are rounded to the compute type, then the result is; `fp8_a8` rounds the result alone.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def some_values(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + 1000 * columns)
    return (
        torch.randn(rows, columns, generator=generator)
        * (spread * torch.randn(rows, columns, generator=generator)).exp2()
    )


def test_every_code_decodes_to_torchs_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    finite = torch.isfinite(codes.float())
    assert torch.equal(decode(codes[finite]), codes[finite].float())


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 90),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    power=st.integers(-100, 100),
)
@settings(max_examples=share(30), deadline=None)
def test_every_value_is_within_half_a_step_of_the_grid(rows: int, columns: int, spread: float, power: int) -> None:
    values = some_values(rows, columns, spread) * 2.0**power
    stored = quantize_float8(values)
    scales = stored.scales[:, None].double()
    exponents = torch.floor(torch.log2((values.double() / scales).abs())).clamp_min(LEAST_EXPONENT)
    half_steps = 2.0 ** (exponents - FRACTION_BITS - 1) * scales
    error = (stored.codes.double() * scales - values.double()).abs()
    assert (error <= half_steps * (1 + 1e-5)).all()


def test_the_largest_value_fills_the_range_and_zeros_stay_zero() -> None:
    values = torch.tensor([[3.0, -7.0], [0.0, 0.0], [1e-30, 5e-31]])
    stored = quantize_float8(values)
    assert float(stored.codes[0, 1].float()) == -LARGEST
    assert torch.equal(stored.dequantized()[1], torch.zeros(2))
    torch.testing.assert_close(stored.dequantized()[2, 0], values[2, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("extreme", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, 1e-45])
def test_extremes_saturate_and_never_overflow(extreme: float) -> None:
    stored = quantize_float8(torch.tensor([[extreme, -extreme, 0.0]]))
    assert torch.isfinite(stored.dequantized()).all()


@pytest.mark.parametrize("name", FLOAT8)
@given(
    rows=st.integers(1, 70),
    columns=st.one_of(st.integers(1, 100), st.sampled_from([16, 64])),
    count=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=share(25), deadline=None)
def test_a_linear_computes_what_is_defined(
    name: FormatName, rows: int, columns: int, count: int, dtype: torch.dtype
) -> None:
    module = make_linear(some_values(rows, columns) * 0.05, None, name, dtype)
    assert isinstance(module, Float8Linear)
    tokens = some_values(count, columns).to(dtype)
    seen = quantize_float8(tokens).dequantized().double() if name == "fp8_a8" else tokens.double()
    weight = module.dequantized().double()
    error = (module(tokens).double() - seen @ weight.t()).abs()
    assert (error <= TOLERANCE[dtype] * (seen.abs() @ weight.abs().t()) + 1e-7).all()


def test_wide_weights_are_decoded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tokens = make_linear(some_values(50, 64), None, "fp8_e4m3", torch.float32), some_values(3, 64)
    whole = module(tokens)
    monkeypatch.setattr(float8_kernels, "WEIGHTS_AT_A_TIME", 7 * 64)
    torch.testing.assert_close(module(tokens), whole)


def test_float8_units_give_what_the_reference_gives() -> None:
    """torch multiplies float8 on CPUs too (slowly), so that the path of GPUs is exercised here."""
    if not features.scaled_mm(torch.device("cpu")):
        pytest.skip("torch has no float8 product for this processor")
    weight, tokens = quantize_float8(some_values(48, 64)), some_values(5, 64)
    torch.testing.assert_close(
        float8_kernels.scaled_mm(tokens, weight), float8_kernels.reference(tokens, weight), rtol=1e-5, atol=1e-4
    )
    assert not float8_kernels.scaled_mm_runs(tokens, weight)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_a8"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_token_breaks_its_own_row_alone(name: FormatName, broken: float) -> None:
    module = make_linear(some_values(8, 32), None, name, torch.float32)
    tokens = some_values(3, 32)
    expected = module(tokens)
    tokens[1, 4] = broken
    out = module(tokens)
    assert not torch.isfinite(out[1]).any()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_every_format_has_a_last_resort() -> None:
    for name in FLOAT8:
        module = make_linear(some_values(3, 5), None, name, torch.float32)
        assert isinstance(module, Float8Linear)
        assert select(FLOAT8_KERNELS, name, some_values(1, 5), module.stored).format == name


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 90)),
    block=st.tuples(st.integers(1, 80), st.integers(1, 100)),
    tokens=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=share(40), deadline=None)
def test_blocks_of_any_size_multiply_as_the_weight_that_they_stand_for(
    shape: tuple[int, int], block: tuple[int, int], tokens: int, dtype: torch.dtype
) -> None:
    codes, scales, wanted = rounded_in_blocks(some_values(*shape), block)
    linear = BlockFloat8Linear(checked_blocks("it", codes, scales, block), None)
    assert torch.equal(linear.dequantized(), wanted)
    assert stored_bytes_of(linear) == block_float8_bytes(*shape, block)
    inputs = some_values(tokens, shape[1]).to(dtype)
    assert torch.equal(linear(inputs), torch.nn.functional.linear(inputs, wanted.to(dtype)))
