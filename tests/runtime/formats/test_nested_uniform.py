"""Laws of the uniform nested form: top bits are a model, every bit helps, importance counts, bytes are told."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference.nested_uniform import WIDTHS, NestedUniform, quantize, sliced
from strata_planner.contract.formats import stored_bytes
from strata_runtime.formats import PrecisionError
from tests.laws import share
from tests.runtime.formats.any_precision.test_quantize import heavy_tailed, importances

torch.set_num_threads(1)


def error(parent: NestedUniform, bits: int, weight: torch.Tensor, importance: torch.Tensor) -> float:
    return float((importance * (parent.at(bits) - weight).square()).sum() / (importance * weight.square()).sum())


@given(shape=st.tuples(st.integers(1, 6), st.integers(1, 400)), bits=st.integers(1, 8), seed=st.integers(0, 5))
@settings(max_examples=share(40), deadline=None)
def test_the_top_bits_are_the_model(shape: tuple[int, int], bits: int, seed: int) -> None:
    parent = quantize(heavy_tailed(*shape, seed=seed))
    kept = parent.codes >> (8 - bits) << (8 - bits)
    assert torch.equal(NestedUniform(kept, parent.scales, parent.zeros, parent.group).at(bits), parent.at(bits))


@given(values=st.lists(st.floats(0, 255), min_size=1, max_size=20), bits=st.integers(1, 8))
@settings(deadline=None)
def test_the_nearest_code_has_the_nearest_value_at_every_width(values: list[float], bits: int) -> None:
    exact = torch.tensor(values, dtype=torch.float64)
    grid = sliced(torch.arange(256.0), bits).unique().double()
    best = (exact[:, None] - grid).abs().amin(dim=1)
    found = (sliced(exact.round().float(), bits).double() - exact).abs()
    torch.testing.assert_close(found, best)


@pytest.mark.parametrize("shape", [(8, 256), (3, 1000)])
def test_the_error_falls_with_every_bit(shape: tuple[int, int]) -> None:
    weight, importance = heavy_tailed(*shape), importances(*shape)
    for weighed in (None, importance):
        parent = quantize(weight, importance=weighed)
        errors = [
            error(parent, bits, weight, torch.ones_like(weight) if weighed is None else weighed) for bits in WIDTHS
        ]
        assert all(finer < 0.7 * coarser for coarser, finer in pairwise(errors))


@pytest.mark.parametrize("bits", [3, 4])
def test_importance_lowers_the_error_that_it_weighs(bits: int) -> None:
    weight, importance = heavy_tailed(8, 1024), importances(8, 1024)
    aware, plain = quantize(weight, importance=importance), quantize(weight)
    assert error(aware, bits, weight, importance) < 0.9 * error(plain, bits, weight, importance)


def test_fewer_widths_are_served_better() -> None:
    weight = heavy_tailed(8, 1024)
    alone, together = quantize(weight, widths=(3,)), quantize(weight)
    assert error(alone, 3, weight, torch.ones_like(weight)) <= error(together, 3, weight, torch.ones_like(weight))


@pytest.mark.parametrize("weight", [torch.zeros(2, 10), torch.full((3, 200), 0.25), torch.tensor([[1.0]])])
def test_equal_values_are_kept(weight: torch.Tensor) -> None:
    for bits in WIDTHS:
        torch.testing.assert_close(quantize(weight).at(bits), weight, rtol=0, atol=1e-2)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_bytes_are_those_of_gptq_with_wider_zeros(bits: int) -> None:
    """A float16 zero where GPTQ has one of 8 bits."""
    formats = {3: "gptq3", 4: "gptq4", 8: "gptq8"}
    counted = stored_bytes(formats[bits], 24, 300, "float16")  # type: ignore[arg-type]
    assert quantize(heavy_tailed(24, 300)).stored_bytes(bits) == counted + 24 * 3


@pytest.mark.parametrize("peak", [70000.0, float("nan")])
def test_values_beyond_float16_are_refused(peak: float) -> None:
    with pytest.raises(PrecisionError, match="hold at most 65504"):
        quantize(torch.full((2, 4), peak))
