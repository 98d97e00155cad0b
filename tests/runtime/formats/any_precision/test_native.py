"""The native quantizer is the one in torch, code for code, on every path of the processor and any number of threads; so are sums of Hessians, but for rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.formats.any_precision import native
from strata_runtime.formats.any_precision.quantize import cluster_rows
from strata_runtime.formats.any_precision.refit import curved
from tests.laws import share
from tests.runtime.formats.any_precision.test_quantize import DEGENERATE, heavy_tailed, importances

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(native.library_here() is None, reason="no native library is here")
WIDEST = 2


def same(weight: torch.Tensor, importance: torch.Tensor | None, seed_bits: int = 3, bits: int = 8) -> None:
    ours, theirs = (torch.empty(weight.shape, dtype=torch.uint8) for _ in range(2))
    tables = native.cluster_rows(weight, importance, seed_bits, bits, ours)
    expected = cluster_rows(weight, importance, seed_bits, bits, theirs)
    assert torch.equal(ours, theirs)
    assert list(tables) == list(expected) == list(range(seed_bits, bits + 1))
    for width, table in tables.items():
        assert torch.equal(table, expected[width])


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 600)),
    widths=st.lists(st.integers(1, 8), min_size=2, max_size=2).map(sorted),
    seed=st.integers(0, 9),
    weighted=st.booleans(),
    values=st.sampled_from([2, 50, 1 << 20]),
)
@settings(max_examples=share(80), deadline=None)
def test_any_rows(shape: tuple[int, int], widths: list[int], seed: int, values: int, *, weighted: bool) -> None:
    weight = (heavy_tailed(*shape, seed=seed) * values).round() / values
    same(weight, importances(*shape, seed=seed + 9) if weighted else None, *widths)


def test_every_path_of_the_processor(level: str) -> None:
    same(heavy_tailed(6, 3001), importances(6, 3001))
    same(heavy_tailed(6, 3001), None)


@pytest.mark.parametrize("weight", DEGENERATE.values(), ids=DEGENERATE)
def test_few_values(weight: torch.Tensor) -> None:
    for importance in (None, torch.zeros_like(weight), weight.abs()):
        same(weight, importance)


def test_views_and_the_importance_of_columns() -> None:
    whole = heavy_tailed(64, 40)
    same(whole.t(), importances(64, 40).t())
    same(whole[1:, 3:], importances(1, 37).expand(63, -1))


def test_threads_share_rows() -> None:
    weight = heavy_tailed(33, 500)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            codes = torch.empty(weight.shape, dtype=torch.uint8)
            native.cluster_rows(weight, None, 3, 8, codes)
        finally:
            torch.set_num_threads(1)
        found.append(codes)
    assert all(torch.equal(each, found[0]) for each in found)


def sums_to(columns: int, bits: int, rows: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [R, K], errors [R, K] and a Hessian [K, K] whose inputs have a mean."""
    draws = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, columns, generator=draws) * (1 << bits) / 5 + (1 << bits) / 2).clamp(0, (1 << bits) - 1)
    inputs = torch.randn(50, columns, generator=draws) + 1
    return codes.to(torch.uint8), torch.randn(rows, columns, generator=draws), inputs.t() @ inputs


@given(columns=st.integers(1, 300), bits=st.integers(1, 8), rows=st.integers(1, 5), seed=st.integers(0, 9))
@settings(max_examples=share(30), deadline=None)
def test_sums_of_hessians(columns: int, bits: int, rows: int, seed: int) -> None:
    codes, missed, hessian = sums_to(columns, bits, rows, seed)
    found, expected = native.curved(codes, missed, hessian, 1 << bits), curved(codes, missed, hessian, 1 << bits)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("columns", [257, 2300])
def test_sums_of_hessians_have_one_order(columns: int, level: str) -> None:
    """On every path and any number of threads, over several tiles that do not divide."""
    codes, missed, hessian = sums_to(columns, 4)
    found = native.curved(codes, missed, hessian, 16)
    native.library_here().strata_limit_cpu_level(WIDEST)  # type: ignore[union-attr]
    torch.set_num_threads(3)
    try:
        again = native.curved(codes, missed, hessian, 16)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
    for ours, theirs in zip(found, curved(codes, missed, hessian, 16), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))
