"""Laws of a linear at any precision: bytes as counted, errors that fall with bits, the same answer every time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import COMPUTE_TYPE_BYTES, ComputeType, FormatName, stored_bytes
from strata_runtime.formats import (
    COMPUTE_DTYPES,
    MAKERS,
    PrecisionError,
    WeightNotFiniteError,
    make_linear,
    stored_bytes_of,
)
from tests.laws import share

torch.set_num_threads(1)
SHAPES = st.tuples(st.integers(1, 200), st.integers(1, 300))


def a_weight(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed)) * 0.05


@given(
    shape=SHAPES,
    name=st.sampled_from(sorted(MAKERS)),
    compute=st.sampled_from(sorted(COMPUTE_DTYPES)),
    bias_items=st.sampled_from([0, 1]),
)
@settings(max_examples=share(60), deadline=None)
def test_stored_bytes_are_what_the_contract_counts(
    shape: tuple[int, int], name: FormatName, compute: ComputeType, bias_items: int
) -> None:
    out_features, in_features = shape
    bias = torch.zeros(out_features) if bias_items else None
    module = make_linear(a_weight(*shape), bias, name, COMPUTE_DTYPES[compute])
    bias_bytes = bias_items * out_features * COMPUTE_TYPE_BYTES[compute]
    assert stored_bytes_of(module) == stored_bytes(name, out_features, in_features, compute) + bias_bytes


@pytest.mark.parametrize("name", sorted(MAKERS))
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


@pytest.mark.parametrize(
    ("name", "compute", "rule"),
    [
        ("int4", torch.float16, r"reaches 70000, and int4 in torch\.float16 holds at most 16376; compute in bfloat16"),
        ("any4", torch.float32, r"reaches 70000, and any4 in torch\.float32 holds at most 65504; use another format"),
    ],
)
def test_values_beyond_what_a_format_holds_are_refused(name: FormatName, compute: torch.dtype, rule: str) -> None:
    with pytest.raises(PrecisionError, match=rule):
        make_linear(torch.full((16, 32), 70000.0), None, name, compute)


# Formats of one kind, the most exact first.
KINDS: dict[str, list[FormatName]] = {
    "rounded": ["int8", "w8a8", "int4", "int3"],
    "float8": ["fp8_e4m3", "fp8_a8", "int4"],
    "any-precision": ["any8", "any7", "any6", "any5", "any4", "any3"],
}


@pytest.mark.parametrize("compute", sorted(COMPUTE_DTYPES))
@pytest.mark.parametrize("kind", KINDS)
def test_error_falls_with_bits(compute: ComputeType, kind: str) -> None:
    dtype = COMPUTE_DTYPES[compute]
    weight, tokens = a_weight(192, 768), a_weight(5, 768, seed=1)
    exact = tokens @ weight.t()

    def error(name: FormatName) -> float:
        return float((make_linear(weight, None, name, dtype)(tokens.to(dtype)) - exact).norm())

    found = sorted(KINDS[kind], key=error)
    coarse = KINDS[kind] if compute == "float32" else [name for name in KINDS[kind] if name not in {"any7", "any8"}]
    assert [name for name in found if name in coarse] == coarse  # beyond 6 bits the compute type's own rounding decides


@given(shape=SHAPES, name=st.sampled_from(sorted(MAKERS)), count=st.integers(2, 80))
@settings(max_examples=share(60), deadline=None)
def test_a_row_alone_equals_the_row_in_a_batch(shape: tuple[int, int], name: FormatName, count: int) -> None:
    module = make_linear(a_weight(*shape), a_weight(shape[0], 1)[:, 0], name, torch.float32)
    tokens = a_weight(count, shape[1], seed=2)
    together = module(tokens)
    for row in (0, count - 1):
        torch.testing.assert_close(module(tokens[row]), together[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("count", [1, 100])
def test_the_same_input_gives_the_same_bits(name: FormatName, count: int) -> None:
    weight, tokens = a_weight(80, 160), a_weight(count, 160, seed=3).to(torch.bfloat16)
    first, second = (make_linear(weight, None, name, torch.bfloat16) for _ in range(2))
    assert torch.equal(first(tokens), second(tokens))
    assert torch.equal(first(tokens), first(tokens))


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("compute", sorted(COMPUTE_DTYPES))
def test_the_bias_is_added_and_leading_dimensions_kept(name: FormatName, compute: ComputeType) -> None:
    dtype = COMPUTE_DTYPES[compute]
    weight, bias = a_weight(24, 40), torch.arange(24.0)
    tokens = a_weight(6, 40).view(2, 3, 40).to(dtype)
    plain, biased = make_linear(weight, None, name, dtype), make_linear(weight, bias, name, dtype)
    assert biased(tokens).shape == (2, 3, 24)
    assert biased(tokens).dtype == dtype
    torch.testing.assert_close(biased(tokens), plain(tokens) + bias.to(dtype), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("compute", sorted(COMPUTE_DTYPES))
def test_no_tokens_give_no_rows(name: FormatName, compute: ComputeType) -> None:
    module = make_linear(a_weight(80, 64), None, name, COMPUTE_DTYPES[compute])
    assert module(torch.zeros(0, 64, dtype=COMPUTE_DTYPES[compute])).shape == (0, 80)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_module_survives_its_state_dict(name: FormatName) -> None:
    one, other = (make_linear(a_weight(80, 64, seed=seed), None, name, torch.float32) for seed in (1, 2))
    other.load_state_dict(one.state_dict())
    tokens = a_weight(3, 64)
    assert torch.equal(one(tokens), other(tokens))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_transposed_weight_is_stored_like_a_straight_one(name: FormatName) -> None:
    straight, tokens = a_weight(80, 64), a_weight(3, 64)
    transposed = straight.t().contiguous().t()
    assert torch.equal(
        make_linear(transposed, None, name, torch.float32)(tokens),
        make_linear(straight, None, name, torch.float32)(tokens),
    )
