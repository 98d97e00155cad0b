"""Norms and rotary positions in the native library: what transformers' own forwards compute, rounded where they round."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama import modeling_llama as llama

from strata_runtime.kernels import native_rowwise
from tests.runtime.kernels.levels import EACH_LEVEL, laws

pytestmark = EACH_LEVEL
ULP = 2.0**-7  # the step between neighbouring values of bfloat16, relative


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def assert_as_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of another order may round one value in some hundred to its neighbour."""
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)
    assert (found != expected).float().mean() < 0.02 or found.numel() < 500


@laws(40)
@given(st.integers(1, 40), st.integers(1, 700), st.integers(0, 99))
def test_norms(count: int, width: int, seed: int) -> None:
    norm = llama.LlamaRMSNorm(width, eps=1e-5).bfloat16()
    norm.weight.data = drawn(seed, width)
    rows = drawn(seed + 1, 1, count, width)
    with torch.inference_mode():
        assert_as_rounded(native_rowwise.rms_norm(rows, norm.weight, 1e-5), norm(rows))


@laws(40)
@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([2, 16, 20, 64, 96, 128]), st.integers(0, 99))
def test_rotary_positions_to_the_bit(heads: int, tokens: int, width: int, seed: int) -> None:
    query, key = drawn(seed, 1, tokens, heads, width).transpose(1, 2), drawn(seed + 1, 1, heads, tokens, width)
    angles = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed)) * 9
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    expected = llama.apply_rotary_pos_emb(query, key, cos, sin)
    for each in (query, key):
        native_rowwise.rotate(each[0], cos[0], sin[0])
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


def test_a_row_that_is_not_finite_reaches_itself_alone() -> None:
    rows, weight = drawn(0, 5, 70), drawn(1, 70)
    expected = native_rowwise.rms_norm(rows, weight, 1e-6)
    rows[2, 3] = torch.nan
    found = native_rowwise.rms_norm(rows, weight, 1e-6)
    assert found[2].isnan().all()
    others = torch.arange(5) != 2
    assert torch.equal(found[others], expected[others])


@laws(40)
@given(st.integers(1, 40), st.integers(1, 700), st.integers(0, 99))
def test_gates(count: int, width: int, seed: int) -> None:
    both = drawn(seed, count, 2 * width) * 9  # up to where a gate is shut
    inputs, factors = both[:, :width], both[:, width:]
    assert_as_rounded(native_rowwise.gate(inputs, factors), torch.nn.functional.silu(inputs) * factors)


def test_gates_that_are_wide_open_or_shut_or_not_finite() -> None:
    inputs = torch.tensor([[0.0, -0.0, 300.0, -300.0, torch.inf, torch.nan, 1.0]]).bfloat16()
    found = native_rowwise.gate(inputs, torch.ones_like(inputs))
    torch.testing.assert_close(found, torch.nn.functional.silu(inputs), rtol=ULP, atol=1e-30, equal_nan=True)
