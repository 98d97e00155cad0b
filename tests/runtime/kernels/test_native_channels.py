"""The native product of bytes gives the reference's bits on every path of the processor, for every shape and view."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_runtime.formats import COMPUTE_DTYPES, reference
from strata_runtime.formats.static8.static_kernels import reference_product
from strata_runtime.formats.static8.static_weight import quantize_static
from strata_runtime.kernels import native, native_channels, native_planes
from tests.laws import share

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library is here")


def some(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


shapes = {
    "count": st.integers(0, 70),
    "rows": st.integers(1, 40),
    "columns": st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 256])),
    "dtype": st.sampled_from(list(COMPUTE_DTYPES.values())),
    "seed": st.integers(0, 99),
}
laws = settings(max_examples=share(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(**shapes)
@laws
def test_a_scale_of_each_token(level: str, count: int, rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    tokens = some(count, columns, seed).to(dtype)
    codes = (some(rows, columns, seed + 1) * 60).round().clamp(-127, 127).to(torch.int8)
    scales = some(rows, 1, seed + 2)[:, 0].abs()
    expected = reference.multiply_quantized(tokens, codes, scales)
    assert torch.equal(native_channels.channel_linear(tokens, codes, scales), expected), level


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 66])
@pytest.mark.parametrize("shape", [(7, 4096), (50, 4150), (97, 9000)])
def test_several_sections_of_columns(level: str, shape: tuple[int, int], count: int) -> None:
    tokens, codes = some(count, shape[1], 0), (some(*shape, 1) * 60).round().clamp(-128, 127).to(torch.int8)
    scales = some(shape[0], 1, 2)[:, 0].abs()
    expected = reference.multiply_quantized(tokens, codes, scales)
    assert torch.equal(native_channels.channel_linear(tokens, codes, scales), expected), level


@given(**shapes)
@laws
def test_scales_known_before(level: str, count: int, rows: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    tokens = (some(count, columns, seed) * 2).to(dtype)
    factors = some(1, columns, seed + 1)[0].abs() + 0.1
    weight = quantize_static(some(rows, columns, seed + 2), factors, 0.02, dtype)
    static = (weight.smoothing, weight.activation_scale)
    found = native_channels.channel_linear(tokens, weight.codes, weight.scales, static)
    assert torch.equal(found, reference_product(tokens, weight)), level


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scales_are", ["of each token", "known before"])
def test_a_broken_token_breaks_its_own_row_alone(level: str, broken: float, scales_are: str) -> None:
    tokens, codes, scales = some(3, 70, 0), (some(9, 70, 1) * 40).to(torch.int8), torch.ones(9)
    known = (torch.ones(70), torch.tensor(0.05)) if scales_are == "known before" else None
    expected = native_channels.channel_linear(tokens, codes, scales, known)
    tokens[1, 69] = broken
    out = native_channels.channel_linear(tokens, codes, scales, known)
    assert torch.isnan(out[1]).all(), level
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_parts_of_larger_tensors_are_multiplied_where_they_lie(level: str) -> None:
    wide, codes = some(6, 300, 0), (some(40, 300, 1) * 40).to(torch.int8)
    tokens, part, scales = wide[1:5, 7:107], codes[3:30, 100:200], torch.rand(40)[3:30]
    expected = reference.multiply_quantized(tokens, part, scales)
    assert torch.equal(native_channels.channel_linear(tokens, part, scales), expected), level
    turned = wide.t()[100:200].t()
    assert torch.equal(
        native_channels.channel_linear(turned, part, scales), reference.multiply_quantized(turned, part, scales)
    )


def test_the_largest_sums_are_exact(level: str) -> None:
    columns = native_planes.MOST_INPUTS_INT8
    tokens, codes = torch.full((1, columns), -3.0), torch.full((2, columns), 127, dtype=torch.int8)
    out = native_channels.channel_linear(tokens, codes, torch.ones(2))
    assert torch.equal(out, reference.multiply_quantized(tokens, codes, torch.ones(2))), level


def test_several_threads_give_the_same_bits() -> None:
    tokens, codes, scales = some(20, 128, 0), (some(100, 128, 1) * 40).to(torch.int8), torch.rand(100)
    alone = native_channels.channel_linear(tokens, codes, scales)
    torch.set_num_threads(2)
    try:
        assert torch.equal(native_channels.channel_linear(tokens, codes, scales), alone)
    finally:
        torch.set_num_threads(1)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        native_channels.channel_linear(torch.zeros(2, 5), torch.zeros(3, 4, dtype=torch.int8), torch.ones(3))
