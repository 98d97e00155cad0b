"""Laws of refitted tables: the same codes, never a larger error of products, smaller where inputs go together."""

from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats import PrecisionError
from strata_runtime.formats.any_precision import AnyParent, native, quantize_any, refit
from tests.laws import share
from tests.runtime.formats.any_precision.test_quantize import DEGENERATE, heavy_tailed

torch.set_num_threads(1)
refitting = import_module("strata_runtime.formats.any_precision.refit")  # the function hides its module


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


@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 120)),
    tokens=st.integers(1, 200),
    widths=st.sets(st.integers(2, 7), max_size=4).map(sorted),
    seed=st.integers(0, 5),
)
@settings(max_examples=share(40), deadline=None)
def test_no_error_grows_and_codes_stay(shape: tuple[int, int], tokens: int, widths: list[int], seed: int) -> None:
    """At any width, with a hundredth of the mean added to H as the fit adds it; what is not asked for stays."""
    weight, seen = heavy_tailed(*shape, seed=seed), inputs(tokens, shape[1], seed)
    parent = quantize_any(weight, 7, seed_bits=2)
    hessian = seen.t() @ seen
    fitted = refit(parent, weight, hessian, widths=widths)
    hessian = (hessian + 0.01 * hessian.diagonal().mean() * torch.eye(shape[1])).double()
    assert torch.equal(fitted.codes, parent.codes)
    assert set(fitted.tables) == set(parent.tables)
    for bits in parent.tables:
        before, after = (each.dequantized(bits).double() - weight for each in (parent, fitted))
        old, new = (torch.einsum("rk,kl,rl->r", each, hessian, each) for each in (before, after))
        assert bool((new <= old * 1.001 + 1e-9).all())
        assert bits in widths or torch.equal(fitted.tables[bits], parent.tables[bits])


def test_widths_do_not_depend_on_each_other() -> None:
    """A width's clusters are the finest one's, summed: what is fitted beside it changes nothing but roundings."""
    weight, seen = heavy_tailed(16, 200), inputs(500, 200)
    parent, hessian = quantize_any(weight), seen.t() @ seen
    together = refit(parent, weight, hessian, widths=(3, 4, 6))
    for bits in (3, 4, 6):
        alone = refit(parent, weight, 7 * hessian, widths=(bits,))
        torch.testing.assert_close(together.tables[bits], alone.tables[bits], rtol=4e-3, atol=2e-3)


def test_torch_alone_fits_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = heavy_tailed(16, 200), inputs(500, 200)
    parent, hessian = quantize_any(weight), seen.t() @ seen
    usual = refit(parent, weight, hessian)
    monkeypatch.setattr(native, "library_here", lambda: None)
    monkeypatch.setattr(refitting, "VALUES_AT_A_TIME", 3 * 200 * 32)  # some rows at a time
    for bits, table in refit(parent, weight, hessian).tables.items():
        torch.testing.assert_close(table, usual.tables[bits], rtol=4e-3, atol=2e-3)


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
