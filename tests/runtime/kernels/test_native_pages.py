"""The native library stores and restores 8-bit keys and values with the bits of torch's way, on every path of the processor."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.kernels import native, native_pages
from strata_runtime.model.kv.pool import LayerPool, PoolShape, RoundedPool, make_pool
from tests.laws import share

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library is here")
PAGES = 6


def both(shape: PoolShape) -> tuple[LayerPool, LayerPool]:
    """One that uses the library, one that does not."""
    ours, torchs = make_pool(shape, 8), make_pool(shape, 8)
    assert isinstance(torchs, RoundedPool)
    torchs._native = False
    return ours, torchs


@given(
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 7, 16, 32, 40, 64, 80]),
    page_tokens=st.sampled_from([1, 4, 16]),
    tokens=st.integers(1, 5),
    dtype=st.sampled_from(list(COMPUTE_DTYPES.values())),
    power=st.integers(-20, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=share(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_holds_and_restores_torchs_bits(
    level: str, heads: int, width: int, page_tokens: int, tokens: int, dtype: torch.dtype, power: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pools = both(PoolShape(PAGES, page_tokens, heads, width, dtype, torch.device("cpu")))
    tokens = min(tokens, PAGES * page_tokens)
    limit = torch.finfo(dtype).max
    given_entries = (
        (torch.randn(2, heads, tokens, width, generator=generator) * 2.0**power).clamp(-limit, limit).to(dtype)
    )
    key, value = given_entries[0], given_entries[1].transpose(0, 1).contiguous().transpose(0, 1)
    places = torch.randperm(PAGES * page_tokens, generator=generator)[:tokens]
    seen = [pool.store(places, key, value) for pool in pools]
    assert torch.equal(seen[0][0], seen[1][0]), level
    assert torch.equal(seen[0][1], seen[1][1])
    for mine, theirs in zip(pools[0].storage, pools[1].storage, strict=True):
        assert torch.equal(mine, theirs)
    pages = torch.randint(0, PAGES, (4,), generator=generator)
    gathered = [pool.gather(pages) for pool in pools]
    assert torch.equal(gathered[0], gathered[1])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_token_alone(level: str, broken: float) -> None:
    layer = make_pool(PoolShape(2, 4, 1, 8, torch.float32, torch.device("cpu")), 8)
    entries = torch.ones(1, 3, 8)
    entries[0, 1, 5] = broken
    layer.store(torch.tensor([0, 1, 2]), entries, torch.ones(1, 3, 8))
    held = layer.gather(torch.tensor([0]))
    assert not torch.isfinite(held[0, 0, 1]).any(), level
    assert torch.isfinite(held[:, 0, [0, 2, 3]]).all()
    assert torch.isfinite(held[1]).all()


def test_several_threads_give_the_same_bits() -> None:
    shape = PoolShape(PAGES, 16, 4, 32, torch.bfloat16, torch.device("cpu"))
    layer = make_pool(shape, 8)
    entries = torch.randn(2, 4, 40, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    layer.store(torch.arange(40), *entries)
    pages = torch.arange(PAGES)
    alone = layer.gather(pages)
    torch.set_num_threads(2)
    try:
        assert torch.equal(layer.gather(pages), alone)
    finally:
        torch.set_num_threads(1)


def test_a_gpus_pool_does_without() -> None:
    assert not native_pages.takes(torch.device("cuda"))
