"""Attention over pages on a GPU: plain attention over each sequence, the same bits whatever lies beside it, and a pool that lies as the kernel reads it."""

from dataclasses import replace

import pytest
import torch

from strata_runtime.kernels import paged_attention
from strata_runtime.kernels.native_attention import Entries
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.model.kv.rounding import restore, round_entries
from tests.runtime.kernels.paged_steps import PLAIN, PagedStep, attended

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
SPANS = [(3000, 1), (3, 70), (0, 1), (511, 1), (512, 1), (900, 17)]
RULES: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"window": 300},
    "cap": {"window": 64, "soft_cap": 5.0},
    "chunk": {"chunk": 256},
    "slopes": {"slopes": True},
    "sinks": {"sinks": True, "window": 128},
}


def a_step(width: int, dtype: torch.dtype) -> PagedStep:
    return PagedStep(SPANS, heads=8, kv_heads=2, width=width, page_tokens=16, dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_step_is_plain_attention(name: str, width: int, dtype: torch.dtype) -> None:
    if not paged_attention.takes(dtype, torch.device("cuda", 0), width):
        pytest.skip("no kernel for it: pages are gathered")
    step = a_step(width, dtype)
    terms = {term: torch.linspace(-0.5, 0.5, 8, device="cuda") for term in ("slopes", "sinks") if RULES[name].get(term)}
    scores = replace(PLAIN, scale=width**-0.5, **{**RULES[name], **terms})  # type: ignore[arg-type]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(attended(step, scores).float(), step.expected(scores), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_entries_of_8_bits_are_what_the_pool_restores(dtype: torch.dtype) -> None:
    step = a_step(128, dtype)
    (keys, own), (values, held) = round_entries(step.keys), round_entries(step.values)
    restored = Entries(restore(keys, own, dtype), restore(values, held, dtype))
    found = attended(step, PLAIN, Entries(keys, values, (own, held)))
    torch.testing.assert_close(found, attended(step, PLAIN, restored), atol=TOLERANCE[dtype], rtol=0)


def test_what_a_token_gets_does_not_depend_on_those_beside_it() -> None:
    step = a_step(128, torch.bfloat16)
    whole, row = attended(step, PLAIN), 0
    for number, (_, length) in enumerate(SPANS):
        assert torch.equal(attended(step.alone(number), PLAIN), whole[row : row + length])
        row += length


def test_a_pool_on_a_gpu_lies_page_by_page() -> None:
    cache = PagedKvCache(
        num_layers=1,
        first_layer=0,
        pages=4,
        page_tokens=16,
        kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    pages = cache._layers[0].pages
    assert pages is not None
    assert pages.keys.shape == (4, 16, 2, 64)
    assert pages.keys.is_contiguous()
