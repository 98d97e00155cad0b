"""One entry of a token for key and value: it takes the bytes that the contract counts, and attention sees it as both."""

import pytest
import torch

from strata_planner.contract.frames import Segment
from strata_planner.contract.kv import KV_BITS, kv_token_bytes
from strata_runtime.model.attention import attend
from strata_runtime.model.attention_rule import AttentionRule
from tests.runtime.dealt import DealtCache

WIDTH, TOKENS, HEADS = 12, 21, 4


def a_cache(kv_bits: int = 16, *, latent: bool = True) -> DealtCache:
    return DealtCache(
        num_layers=2,
        first_layer=0,
        pages=10,
        page_tokens=4,
        kv_heads=1,
        head_dim=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kv_bits=kv_bits,
        latent=latent,
    )


@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_the_pool_takes_the_bytes_that_are_counted(kv_bits: int) -> None:
    assert a_cache(kv_bits).bytes == 2 * 10 * 4 * kv_token_bytes(kv_bits, 1, WIDTH, "float32", latent=True)


@pytest.mark.parametrize(("kv_bits", "tolerance"), [(16, 1e-6), (8, 0.05)])
@pytest.mark.parametrize("cuts", [(21,), (9, 11, 1), (20, 1)], ids=str)
def test_it_is_attended_to_as_a_key_and_a_value_that_are_equal(
    cuts: tuple[int, ...], kv_bits: int, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, entry = (torch.randn(heads, TOKENS, WIDTH, generator=generator) for heads in (HEADS, 1))
    latent, plain = a_cache(kv_bits), a_cache(latent=False)
    start = 0
    for length in cuts:
        rows, segments = slice(start, start + length), [Segment(0, start, length, 0)]
        found, wanted = (
            attend(each.plan(segments), 1, query[:, rows], entry[:, rows], entry[:, rows], AttentionRule(0.3))
            for each in (latent, plain)
        )
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)
        start += length
