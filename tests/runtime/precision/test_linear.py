"""Laws of a linear at any precision: bytes as counted, errors that fall with bits, the same answer every time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, FORMAT_NAMES, ComputeType, FormatName, stored_bytes
from strata_runtime.precision import PrecisionError, WeightNotFiniteError, make_linear, stored_bytes_of

torch.set_num_threads(1)
DTYPES: dict[ComputeType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
SHAPES = st.tuples(st.integers(1, 200), st.integers(1, 300))
QUANTIZED = [name for name in FORMAT_NAMES if name != "dense"]


def a_weight(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)) * 0.05


@given(
    shape=SHAPES,
    name=st.sampled_from(FORMAT_NAMES),
    compute=st.sampled_from(sorted(DTYPES)),
    bias_items=st.sampled_from([0, 1]),
)
@settings(max_examples=60, deadline=None)
def test_stored_bytes_are_what_the_contract_counts(
    shape: tuple[int, int], name: FormatName, compute: ComputeType, bias_items: int
) -> None:
    out_features, in_features = shape
    bias = torch.zeros(out_features) if bias_items else None
    module = make_linear(a_weight(*shape), bias, name, DTYPES[compute])
    bias_bytes = bias_items * out_features * COMPUTE_TYPE_BYTES[compute]
    assert stored_bytes_of(module) == stored_bytes(name, out_features, in_features, compute) + bias_bytes


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(name: FormatName, broken: float) -> None:
    weight = a_weight(16, 32)
    weight[3, 5] = broken
    with pytest.raises(WeightNotFiniteError, match=r"layers\.7\.mlp\.up_proj: 1 of 512 values of the weight"):
        make_linear(weight, None, name, torch.float32, name="layers.7.mlp.up_proj")


@pytest.mark.parametrize(
    ("weight", "bias", "rule"),
    [
        (torch.zeros(4), None, "must be a floating-point matrix"),
        (torch.zeros(4, 4, dtype=torch.int8), None, "must be a floating-point matrix"),
        (torch.zeros(4, 4), torch.zeros(3), "one value per output"),
    ],
    ids=["vector", "integers", "short-bias"],
)
def test_impossible_shapes_are_refused(weight: torch.Tensor, bias: torch.Tensor | None, rule: str) -> None:
    with pytest.raises(PrecisionError, match=rule):
        make_linear(weight, bias, "int4", torch.float32)
