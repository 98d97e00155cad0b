"""Pools of one layer in another number of pages: what both have stays, bit for bit, however it lies."""

import pytest
import torch

from strata_runtime.model.kv.boundary_log import BoundaryLog
from strata_runtime.model.kv.pool import PoolShape, make_pool, with_pages


@pytest.mark.parametrize("pages", [2, 5, 9], ids=["fewer", "as many", "more"])
@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("bits", [16, 8])
def test_what_pages_hold_stays(bits: int, pages: int, *, latent: bool, page_major: bool) -> None:
    shape = PoolShape(5, 4, 2, 16, torch.float32, torch.device("cpu"), page_major)
    pool = make_pool(shape, bits, latent=latent)
    key, value = torch.randn(2, 2, 20, 16, generator=torch.Generator().manual_seed(1))
    pool.store(torch.arange(20), key, key if latent else value)
    both = torch.arange(min(pages, 5))
    held = pool.gather(both)
    other = with_pages(pool, pages)
    assert (other is pool) == (pages == 5)
    assert (other.kind, other.shape.pages, other.bytes * 5) == ((bits, latent), pages, pool.bytes * pages)
    assert torch.equal(other.gather(both), held)
    if pages > 5:
        assert not other.gather(torch.arange(5, pages)).any()


@pytest.mark.parametrize("pages", [2, 5, 9])
def test_what_a_stage_handed_on_stays(pages: int) -> None:
    old, new = BoundaryLog(5, 4, 8, torch.bfloat16), BoundaryLog(pages, 4, 8, torch.bfloat16)
    rows = torch.randn(20, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    old.write(torch.arange(20).flip(0), rows)
    new.take(old)
    places = torch.arange(min(pages, 5) * 4)
    assert torch.equal(new.read(places), rows.flip(0)[: len(places)])
    assert new.bytes == pages * 4 * 8 * 2
    new.write(torch.arange(40), torch.ones(40, 8, dtype=torch.bfloat16))
    assert new.read(torch.arange(pages * 4)).eq(1).all()  # and what it has no room for is not kept
