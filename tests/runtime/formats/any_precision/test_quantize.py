"""Laws of an any-precision parent: nested, better with every bit, exact where it can be, the same every time."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats import PrecisionError
from strata_runtime.formats.any_precision import AnyParent, quantize_any
from tests.laws import share

torch.set_num_threads(1)
WIDTHS = range(3, 9)


def heavy_tailed(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Student's t of 5 degrees of freedom."""
    draws = torch.randn(6, out_features, in_features, generator=torch.Generator().manual_seed(seed))
    return 0.02 * draws[0] / draws[1:].square().mean(dim=0).sqrt()


def importances(out_features: int, in_features: int, seed: int = 1) -> torch.Tensor:
    """Like mean squares of gradients: some weights matter thousands of times more than others."""
    draws = torch.randn(2, out_features, in_features, generator=torch.Generator().manual_seed(seed))
    return (draws[0] * draws[1].exp()).square()


def error(parent: AnyParent, bits: int, weight: torch.Tensor, importance: torch.Tensor | None = None) -> float:
    """Relative, squared, weighted."""
    importance = torch.ones_like(weight) if importance is None else importance
    missed = importance * (parent.dequantized(bits) - weight).square()
    return float(missed.sum() / (importance * weight.square()).sum())


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 400)),
    bits=st.integers(3, 8),
    seed=st.integers(0, 5),
    weighted=st.booleans(),
    values=st.sampled_from([3, 40, 1 << 20]),
)
@settings(max_examples=share(80), deadline=None)
def test_a_parent_holds_every_narrower_model(
    shape: tuple[int, int], bits: int, seed: int, values: int, *, weighted: bool
) -> None:
    """`values`: how many different ones there are at most; few of them leave clusters empty."""
    weight = (heavy_tailed(*shape, seed=seed) * values).round() / values
    importance = importances(*shape, seed=seed + 9) if weighted else None
    whole, narrow = (quantize_any(weight, width, importance=importance) for width in (8, bits))
    assert torch.equal(whole.codes >> (8 - bits), narrow.codes)
    for width in range(3, bits + 1):
        assert torch.equal(whole.tables[width], narrow.tables[width])
        assert bool((whole.tables[width].diff(dim=1) >= 0).all()), "a table is not sorted"
        assert float(whole.tables[width].min()) >= float(weight.min().half())
        assert float(whole.tables[width].max()) <= float(weight.max().half())
    assert torch.equal(whole.at(bits, torch.float32).dequantized(), whole.dequantized(bits))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4, 64), (3, 300), (2, 3000)])
def test_the_error_falls_with_every_bit(shape: tuple[int, int], *, weighted: bool) -> None:
    weight = heavy_tailed(*shape)
    importance = importances(*shape) if weighted else torch.ones(shape)
    parent = quantize_any(weight, importance=importance)
    errors = [error(parent, bits, weight, importance) for bits in WIDTHS]
    assert all(finer < 0.5 * coarser for coarser, finer in pairwise(errors))


@pytest.mark.parametrize("bits", WIDTHS)
def test_importance_lowers_the_error_that_it_weighs(bits: int) -> None:
    weight, importance = heavy_tailed(8, 1500), importances(8, 1500)
    aware, plain = quantize_any(weight, importance=importance), quantize_any(weight)
    assert error(aware, bits, weight, importance) < 0.9 * error(plain, bits, weight, importance)
    assert error(aware, bits, weight) > error(plain, bits, weight)


def test_the_importance_of_columns_is_that_of_all_their_weights() -> None:
    weight, columns = heavy_tailed(6, 200), importances(1, 200)[0]
    found, spread = (quantize_any(weight, importance=each) for each in (columns, columns.expand(6, -1).contiguous()))
    assert torch.equal(found.codes, spread.codes)


DEGENERATE = {
    "equal": torch.full((3, 100), 0.3),
    "zero": torch.zeros(2, 64),
    "two signs of zero": torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0]]),
    "one column": torch.tensor([[0.25], [-7.0]]),
    "fewer columns than clusters": torch.tensor([[0.5, -1.5, 2.0, 0.125, 3.0]]),
    "few values": torch.tensor([[1.0, 2.0, 4.0]]).repeat(4, 50),
    "largest": torch.tensor([[65504.0, -65504.0, 0.0, 1.0]]),
}


@pytest.mark.parametrize("weight", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("importance", [None, 0.0, 1.0], ids=["unweighted", "nothing matters", "weighted"])
def test_few_values_are_kept_as_they_are(weight: torch.Tensor, importance: float | None) -> None:
    given = None if importance is None else torch.full_like(weight, importance)
    parent = quantize_any(weight, importance=given)
    for bits in WIDTHS:
        torch.testing.assert_close(parent.dequantized(bits), weight.half().float(), rtol=0, atol=0)


def test_what_calibration_never_touched_is_clustered_by_its_values() -> None:
    weight, importance = heavy_tailed(4, 512), importances(4, 512)
    importance[:, 256:] = 0.0
    parent = quantize_any(weight, importance=importance)
    assert error(parent, 8, weight, importance) < 1e-4
    assert error(parent, 8, weight) < 1e-2


def test_equal_weights_of_a_row_have_one_code() -> None:
    weight = (heavy_tailed(5, 600) * 500).round() / 500
    parent = quantize_any(weight, importance=importances(5, 600))
    for row, codes in zip(weight, parent.codes, strict=True):
        assert len(torch.stack([row, codes.float()]).unique(dim=1).t()) == len(row.unique())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type_is_taken(dtype: torch.dtype) -> None:
    weight = heavy_tailed(3, 100).to(dtype)
    assert torch.equal(quantize_any(weight).codes, quantize_any(weight.float()).codes)


REFUSED = {
    "width": ({"bits": 9}, "3 seed bits and 9 bits"),
    "seed": ({"bits": 2}, "3 seed bits and 2 bits"),
    "shape of importance": ({"importance": torch.ones(7)}, r"importance \[7\] must have the weight's shape \[4, 8\]"),
    "negative importance": ({"importance": -torch.ones(4, 8)}, "importance reaches from -1 to -1"),
    "importance not a number": ({"importance": torch.full((4, 8), torch.nan)}, "it must be finite"),
}


@pytest.mark.parametrize(("options", "rule"), REFUSED.values(), ids=REFUSED)
def test_impossible_requests_are_refused(options: dict[str, object], rule: str) -> None:
    with pytest.raises(PrecisionError, match=rule):
        quantize_any(heavy_tailed(4, 8), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("peak", [70000.0, float("inf"), float("nan")])
def test_a_weight_beyond_float16_is_refused(peak: float) -> None:
    weight = heavy_tailed(4, 8)
    weight[1, 1] = peak
    with pytest.raises(PrecisionError, match="hold at most 65504"):
        quantize_any(weight)


def test_a_width_without_a_table_is_refused() -> None:
    with pytest.raises(PrecisionError, match="6 bits: this parent has tables of 3, 4, 5 bits"):
        quantize_any(heavy_tailed(2, 8), 5).at(6, torch.float32)
