"""Laws of refitted tables: the same codes, never a larger error of products, smaller where inputs go together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.precision import PrecisionError
from strata_runtime.precision.any_precision import AnyParent, quantize_any
from strata_runtime.precision.any_precision.refit import refit
from tests.runtime.precision.any_precision.test_quantize import DEGENERATE, heavy_tailed

torch.set_num_threads(1)


def inputs(tokens: int, in_features: int, seed: int = 3) -> torch.Tensor:
    """Tokens that go together: few directions, a mean of their own, unlike scales."""
    draws = torch.Generator().manual_seed(seed)
    directions = torch.randn(max(1, in_features // 8), in_features, generator=draws)
    found = torch.randn(tokens, len(directions), generator=draws) @ directions + torch.randn(
        in_features, generator=draws
    )
    return found + 0.3 * torch.randn(tokens, in_features, generator=draws)


def errors(parent: AnyParent, bits: int, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of each output's products, squared."""
    return (tokens @ (parent.dequantized(bits) - weight).t()).square().sum(dim=0)


@given(shape=st.tuples(st.integers(1, 8), st.integers(1, 120)), tokens=st.integers(1, 200), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_no_error_grows_and_codes_stay(shape: tuple[int, int], tokens: int, seed: int) -> None:
    weight, seen = heavy_tailed(*shape, seed=seed), inputs(tokens, shape[1], seed)
    parent = quantize_any(weight)
    hessian = seen.t() @ seen
    hessian += (
        0.01 * hessian.diagonal().mean() * torch.eye(shape[1])
    )  # what the fit adds: directions hardly seen count a little
    fitted = refit(parent, weight, 7 * hessian)
    assert torch.equal(fitted.codes, parent.codes)
    for bits in parent.tables:
        before, after = (each.dequantized(bits) - weight for each in (parent, fitted))
        old, new = (torch.einsum("rk,kl,rl->r", each, hessian, each) for each in (before, after))
        assert bool((new <= old * 1.05 + 1e-6).all())
        assert bits in {3, 4, 5} or torch.equal(fitted.tables[bits], parent.tables[bits])


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_inputs_that_were_not_seen_gain_too(bits: int) -> None:
    weight, tokens = heavy_tailed(24, 256), inputs(1200, 256)
    seen, unseen = tokens[:1000], tokens[1000:]
    parent = quantize_any(weight)
    fitted = refit(parent, weight, seen.t() @ seen)
    assert float(errors(fitted, bits, weight, unseen).sum()) < 0.8 * float(errors(parent, bits, weight, unseen).sum())


@pytest.mark.parametrize("weight", DEGENERATE.values(), ids=DEGENERATE)
def test_what_is_exact_stays_so(weight: torch.Tensor) -> None:
    parent = quantize_any(weight)
    fitted = refit(parent, weight, torch.eye(weight.shape[1]))
    torch.testing.assert_close(fitted.dequantized(3), parent.dequantized(3), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("hessian", "rule"),
    [
        (torch.eye(7), r"hessian \[7, 7\]: a weight of 8 inputs needs \[8, 8\]"),
        (torch.zeros(8, 8), "its diagonal positive; the mean is 0"),
        (torch.full((8, 8), torch.nan), "must be finite"),
    ],
)
def test_impossible_hessians_are_refused(hessian: torch.Tensor, rule: str) -> None:
    weight = heavy_tailed(2, 8)
    with pytest.raises(PrecisionError, match=rule):
        refit(quantize_any(weight), weight, hessian)
