"""Every kernel computes what the reference defines, for every shape, and tokens choose only among equals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats import features, kernels, make_linear, reference
from strata_runtime.formats.kernels import CHANNEL_KERNELS, GROUP_KERNELS, Kernel
from strata_runtime.formats.rounded.rounded_linear import ChannelLinear, GroupLinear, channel_weight
from strata_runtime.kernels import native_dense
from tests.laws import share

torch.set_num_threads(1)
ALL_KERNELS = {kernel.name: kernel for kernel in (*CHANNEL_KERNELS, *GROUP_KERNELS)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Weights and results are rounded to the compute type at most three times in all.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11}


def a_linear(kernel: Kernel, shape: tuple[int, int], dtype: torch.dtype) -> ChannelLinear | GroupLinear:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.05
    if kernel in CHANNEL_KERNELS:
        return ChannelLinear(channel_weight(weight, kernel.format, dtype), None, kernel.format)
    return GroupLinear(weight, None, kernel.format, dtype)


def some_tokens(count: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def expected(kernel: Kernel, module: ChannelLinear | GroupLinear, tokens: torch.Tensor) -> torch.Tensor:
    if kernel.arithmetic == "8-bit activations":
        assert isinstance(module, ChannelLinear)
        return reference.multiply_quantized(tokens, module.codes, module.scales)
    return reference.multiply(tokens, module.dequantized())


@pytest.mark.parametrize("name", ALL_KERNELS)
@given(
    rows=st.integers(1, 200),
    columns=st.one_of(st.integers(1, 300), st.sampled_from([32, 64, 128, 256, 384])),
    count=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=share(40), deadline=None)
def test_a_kernel_computes_what_the_reference_defines(
    name: str, rows: int, columns: int, count: int, dtype: torch.dtype
) -> None:
    kernel = ALL_KERNELS[name]
    module = a_linear(kernel, (rows, columns), dtype)
    tokens = some_tokens(count, columns, dtype)
    if not kernel.runs(tokens, module.stored):
        return
    result = kernel.run(tokens, module.stored)
    assert result.dtype == dtype
    magnitude = tokens.float().abs() @ module.dequantized().abs().t()
    error = (result.float() - expected(kernel, module, tokens).float()).abs()
    assert (error <= TOLERANCE[dtype] * magnitude + 1e-7).all()


@pytest.mark.parametrize("name", [name for name in ALL_KERNELS if "packed" in name])
def test_packed_kernels_run_here(name: str) -> None:
    if not (features.int4pack_on_cpu() and features.int8pack_on_cpu()):
        pytest.skip("torch has no packed kernels for this processor")
    kernel = ALL_KERNELS[name]
    module = a_linear(kernel, (64, 128), torch.bfloat16)
    assert kernel.runs(some_tokens(1, 128, torch.bfloat16), module.stored)


def test_tokens_choose_only_among_kernels_of_equal_arithmetic() -> None:
    by_format: dict[str, set[str]] = {}
    for kernel in ALL_KERNELS.values():
        by_format.setdefault(kernel.format, set()).add(kernel.arithmetic)
    assert by_format == {
        "int8": {"16-bit activations"},
        "int4": {"16-bit activations"},
        "int3": {"16-bit activations"},
        "w8a8": {"8-bit activations"},
    }


@pytest.mark.parametrize(
    ("format_name", "count", "dtype", "chosen"),
    [
        ("int4", 1, torch.bfloat16, "int4-packed"),
        ("int4", 4096, torch.bfloat16, "int4-dequantized"),
        ("int4", 1, torch.float32, "int4-dequantized"),
        ("int3", 1, torch.bfloat16, "int3-packed"),
        ("int3", 4096, torch.bfloat16, "int3-dequantized"),
        ("int4", 1, torch.bfloat16, "int4-native"),
        ("int4", 4096, torch.bfloat16, "int4-decoded"),
        ("int3", 1, torch.bfloat16, "int3-native"),
    ],
)
def test_the_number_of_tokens_chooses_the_kernel(
    format_name: str, count: int, dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own where nothing else multiplies bfloat16."""
    monkeypatch.setattr(features, "int4pack_on_cpu", lambda: True)
    monkeypatch.setattr(native_dense, "alone", lambda *_: chosen.endswith(("native", "decoded")))
    module = a_linear(ALL_KERNELS[chosen], (64, 128), dtype)
    assert isinstance(module, GroupLinear)
    selected = kernels.select(GROUP_KERNELS, module.format, some_tokens(count, 128, dtype), module.stored)
    assert selected.name == chosen


@pytest.mark.parametrize("format_name", ["int8", "w8a8", "int4", "int3"])
def test_without_any_feature_of_torch_the_answer_is_the_same(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(80, 128, generator=torch.Generator().manual_seed(1)) * 0.05
    module = make_linear(weight, None, format_name, torch.bfloat16)  # type: ignore[arg-type]
    tokens = some_tokens(3, 128, torch.bfloat16)
    with_features = module(tokens)
    for feature in ("int4pack_on_cpu", "int8pack_on_cpu", "int_mm_on_cpu"):
        monkeypatch.setattr(features, feature, lambda: False)
    torch.testing.assert_close(module(tokens), with_features, rtol=0.02, atol=0.01)
