"""Rounding in the native library gives what rounding in torch gives, on every path that this processor has."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_runtime.formats import quantizers
from strata_runtime.kernels import native_rounding
from strata_runtime.kernels.native import library
from tests.laws import share

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library here")


def in_torch(weight: torch.Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> quantizers.GroupCodes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_rounding, "takes", lambda *_: False)
        return quantizers.quantize_groups(weight, bits, group, scale_dtype)


@settings(deadline=None, max_examples=share(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    group=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from([3, 4]),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 2),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_codes_scales_and_zeros_are_those_of_the_reference(
    rows: int,
    groups: int,
    group: int,
    bits: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    seed: int,
    level: str,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, groups * group + 7, generator=generator) * scale
    wide[0, :group] = scale  # a group of one value
    weight = wide.to(dtypes[0])[:, 3 : 3 + groups * group]  # rows that are not neighbours, no alignment
    assert native_rounding.takes_groups(weight, group, dtypes[1])
    found = quantizers.quantize_groups(weight, bits, group, dtypes[1])
    expected = in_torch(weight, bits, group, dtypes[1])
    same = (found.scales == expected.scales) & (found.zeros == expected.zeros)
    assert (
        ~same
    ).sum() <= 1 + same.numel() // 100  # two ranges of a group may have errors that differ by rounding alone
    equal = (found.codes == expected.codes).view(rows, groups, group).all(dim=-1)
    assert equal[same].all()


@settings(deadline=None, max_examples=share(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 2),
    scale=st.sampled_from([1e-30, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_channels_are_those_of_the_reference(
    rows: int, columns: int, dtypes: tuple[torch.dtype, torch.dtype], scale: float, seed: int, level: str
) -> None:
    wide = torch.randn(rows + 1, columns + 5, generator=torch.Generator().manual_seed(seed)) * scale
    wide[0] = 0.0
    weight = wide.to(dtypes[0])[:, 2 : 2 + columns]
    found = quantizers.quantize_channels(weight, dtypes[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_rounding, "takes", lambda *_: False)
        expected = quantizers.quantize_channels(weight, dtypes[1])
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes, expected.codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_take_the_reference(dtype: torch.dtype) -> None:
    assert not native_rounding.takes_groups(torch.ones(4, 32, dtype=dtype), 32, torch.float32)
    assert not native_rounding.takes_groups(torch.ones(4, 32), 32, dtype)
    assert not native_rounding.takes_groups(torch.ones(4, 32), 16, torch.float32)
