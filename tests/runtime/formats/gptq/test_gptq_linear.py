"""Laws of a linear that GPTQ has quantized: it multiplies by the checkpoint's weights and keeps the bytes that are counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import GPTQ, stored_bytes
from strata_runtime.formats import PrecisionError, stored_bytes_of
from strata_runtime.formats.gptq import GptqCodes, store
from strata_runtime.formats.gptq.gptq_linear import GptqLinear
from strata_runtime.formats.gptq.kernels import GPTQ_KERNELS
from tests.laws import share

torch.set_num_threads(1)


def some_codes(
    out_features: int, in_features: int, bits: int, group: int | None, *, ordered: bool = False, seed: int = 0
) -> GptqCodes:
    generator = torch.Generator().manual_seed(seed)
    size = min(group or in_features, in_features)
    groups = torch.arange(in_features, dtype=torch.int32) // size
    count = int(groups.max()) + 1

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)

    return GptqCodes(
        bits=bits,
        codes=draw((out_features, in_features)),
        scales=torch.rand(out_features, count, generator=generator).add(0.01).half(),
        zeros=draw((out_features, count)),
        groups=groups[torch.randperm(in_features, generator=generator)] if ordered else groups,
    )


def is_product(
    out: torch.Tensor,
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | float = 0.0,
    *,
    least: float = 0.0,
) -> bool:
    """As near as the rounding of its terms allows, or to the `least` that counts."""
    bias = torch.as_tensor(bias, dtype=torch.float64)
    wanted = tokens.double() @ weight.double().t() + bias
    size = tokens.double().abs() @ weight.double().abs().t() + bias.abs()
    return bool(((out.double() - wanted).abs() <= size * torch.finfo(out.dtype).eps * 4 + least).all())


@given(
    out_features=st.integers(1, 40),
    in_features=st.integers(1, 700),
    bits=st.sampled_from(sorted(GPTQ)),
    group=st.one_of(st.none(), st.integers(1, 700)),
    ordered=st.booleans(),
)
@settings(max_examples=share(60), deadline=None)
def test_it_multiplies_by_its_weights_and_keeps_the_bytes_that_are_counted(
    *, out_features: int, in_features: int, bits: int, group: int | None, ordered: bool
) -> None:
    codes = some_codes(out_features, in_features, bits, group, ordered=ordered)
    linear = GptqLinear(store(codes, group=group, name="linear"), None)
    tokens = torch.randn(3, in_features, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear.dequantized(), codes.dequantized())
    wanted = tokens.double() @ codes.dequantized().double().t()
    assert torch.allclose(linear(tokens).double(), wanted, rtol=1e-4, atol=1e-4 * (1 << bits))
    counted = stored_bytes(
        GPTQ[bits], out_features, in_features, "float32", group=group or in_features, ordered=linear.order is not None
    )
    assert stored_bytes_of(linear) == counted
    assert linear.format == GPTQ[bits]


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 1100)),
    bits=st.sampled_from(sorted(GPTQ)),
    group=st.one_of(st.none(), st.integers(1, 300)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    skipped=st.integers(0, 3),
)
@settings(max_examples=share(60), deadline=None)
def test_every_kernel_that_runs_here_gives_the_product_of_the_stored_weight(
    shape: tuple[int, int, int], bits: int, group: int | None, dtype: torch.dtype, skipped: int
) -> None:
    """Tokens are rows of a wider matrix, so not all are aligned."""
    count, out_features, in_features = shape
    weight = store(some_codes(out_features, in_features, bits, group), group=group, name="linear")
    wide = torch.randn(count, in_features + skipped, generator=torch.Generator().manual_seed(bits)).to(dtype)
    tokens, values = wide[:, skipped:], weight.dequantized()
    for kernel in GPTQ_KERNELS:
        if kernel.format == GPTQ[bits] and kernel.runs(tokens, weight):
            out = kernel.run(tokens, weight)
            assert out.dtype == dtype
            assert is_product(out, tokens, values, least=1e-6), kernel.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_compute_type_leading_shape_and_bias(dtype: torch.dtype) -> None:
    codes = some_codes(24, 160, 4, 32, ordered=True)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(24, generator=generator).to(dtype)
    linear = GptqLinear(store(codes, group=32, name="linear"), bias)
    tokens = torch.randn(2, 5, 160, generator=generator).to(dtype)
    out = linear(tokens)
    assert out.shape == (2, 5, 24)
    assert out.dtype == dtype
    assert is_product(out, tokens, codes.dequantized(), bias)


def test_inputs_in_their_own_order_take_no_order() -> None:
    assert store(some_codes(4, 96, 4, 32), group=32, name="linear").order is None
    assert store(some_codes(4, 96, 4, None, ordered=True), group=None, name="linear").order is None


def test_nan_and_infinity_of_an_activation_come_through() -> None:
    linear = GptqLinear(store(some_codes(4, 64, 4, 32), group=32, name="linear"), None)
    tokens = torch.ones(2, 64)
    tokens[0, 3] = float("nan")
    out = linear(tokens)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_groups_of_unlike_sizes_are_refused_by_name() -> None:
    codes = some_codes(4, 96, 4, 32)
    uneven = GptqCodes(codes.bits, codes.codes, codes.scales, codes.zeros, (torch.arange(96) // 40).int())
    with pytest.raises(
        PrecisionError, match=r"layers.3.q_proj: its groups have from 16 to 40 inputs, and all must have 32"
    ):
        store(uneven, group=32, name="layers.3.q_proj")


@pytest.mark.parametrize("value", [1e-9, 1e5])
def test_scales_beyond_float16_are_refused_by_name(value: float) -> None:
    codes = some_codes(4, 96, 4, 32)
    scales = torch.full((4, 3), value, dtype=torch.float32)
    with pytest.raises(PrecisionError, match=r"layers.3.q_proj: scales from .* do not fit float16"):
        store(GptqCodes(4, codes.codes, scales, codes.zeros, codes.groups), group=32, name="layers.3.q_proj")
