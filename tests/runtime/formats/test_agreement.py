"""What passes for the same product: another order and rounding of the same sums, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats.agreement import disagreement, size_of_sums
from tests.laws import share

torch.set_num_threads(1)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def some_values(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def size_of(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return size_of_sums(tokens, tuple(values.shape), 100, lambda start, stop: values[start:stop].clone())


@given(
    count=st.integers(1, 20),
    rows=st.integers(1, 40),
    columns=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=share(60), deadline=None)
def test_weights_partial_sums_and_results_may_be_rounded(
    count: int, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    tokens, values = some_values((count, columns), seed).to(dtype), some_values((rows, columns), seed + 1)
    rounded = values.to(dtype)
    expected = (tokens.float() @ values.t()).to(dtype)
    cut = columns // 2
    parts = [
        (tokens[:, part].float() @ rounded[:, part].float().t()).to(dtype) for part in (slice(cut), slice(cut, None))
    ]
    assert disagreement(parts[0] + parts[1], expected, size_of(tokens, values), columns) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [64, 128])
def test_one_group_of_one_output_with_another_scale_or_a_zero_off_by_one_does_not_pass(
    dtype: torch.dtype, group: int
) -> None:
    tokens = some_values((512, 8192), 0).to(dtype)
    codes = torch.randint(0, 16, (4, 8192), generator=torch.Generator().manual_seed(1)).float() - 8
    scales = torch.rand(4, 8192 // group, generator=torch.Generator().manual_seed(2)).add(0.5)
    scales[3, 0], scales[3, 1] = 1.0, 1.4
    values = codes * scales.repeat_interleave(group, dim=1)
    expected, size = (tokens.float() @ values.t()).to(dtype), size_of(tokens, values)
    other_scale, other_zero = values.clone(), values.clone()
    other_scale[3, :group] = codes[3, :group] * scales[3, 1]
    other_zero[3, :group] -= scales[3, 0]
    for wrong in (other_scale, other_zero):
        reason = disagreement((tokens.float() @ wrong.t()).to(dtype), expected, size, 8192)
        assert "roundings" in str(reason)
    assert disagreement(expected, expected, size, 8192) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_does_not_pass(value: float) -> None:
    found = torch.zeros(2, 3)
    found[1, 2] = value
    assert disagreement(found, torch.zeros(2, 3), torch.ones(2, 3), 4) is not None


def test_another_shape_or_type_is_said() -> None:
    expected = torch.zeros(2, 3, dtype=torch.float16)
    for found in (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float16)):
        assert "is the product" in str(disagreement(found, expected, torch.ones(2, 3), 4))
