"""Laws of keys and values at 8 bits: half a step of error, the same bits however tokens arrive, bytes as counted."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import ComputeType
from strata_planner.contract.frames import Segment
from strata_planner.contract.kv import KV_BITS, kv_token_bytes
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.model.attention import attend
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv.rounding import restore, round_entries
from tests.laws import share
from tests.runtime.dealt import DealtCache

torch.set_num_threads(1)
WIDTH, KV_HEADS, HEADS = 8, 2, 4
RULE = AttentionRule(0.3)
CPU = torch.device("cpu")
ROUNDED_ONCE = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def a_cache(kv_bits: int, dtype: torch.dtype = torch.float32, layers: int = 1) -> DealtCache:
    shape = {"num_layers": layers, "first_layer": 0, "pages": 40, "page_tokens": 4}
    return DealtCache(**shape, kv_heads=KV_HEADS, head_dim=WIDTH, dtype=dtype, device=CPU, kv_bits=kv_bits)


def a_text(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    query, key, value = (torch.randn(count, length, WIDTH, generator=generator) for count in heads)
    return query, key, value


def run(cache: DealtCache, text: tuple[torch.Tensor, ...], lengths: list[int], sequence: int = 0) -> torch.Tensor:
    """The sequence in segments of these lengths; what all its tokens attend to, [tokens, heads, width]."""
    outputs, start = [], 0
    for length in lengths:
        batch = cache.plan([Segment(sequence, start, length, 1)])
        query, key, value = (part[:, start : start + length] for part in text)
        outputs.append(attend(batch, 0, query, key, value, RULE))
        start += length
    return torch.cat(outputs)


def rounded(entries: torch.Tensor) -> torch.Tensor:
    return restore(*round_entries(entries), entries.dtype)


@pytest.mark.parametrize("dtype", list(COMPUTE_DTYPES.values()))
@given(power=st.integers(-12, 12), spread=st.sampled_from([0.0, 3.0]), seed=st.integers(0, 99))
@settings(max_examples=share(30), deadline=None)
def test_an_entry_is_off_by_half_a_step_at_most(dtype: torch.dtype, power: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    entries = (
        torch.randn(3, 5, WIDTH, generator=generator) * (spread * torch.randn(3, 5, 1, generator=generator)).exp2()
    )
    limit = torch.finfo(dtype).max
    entries = (entries * 2.0**power).clamp_(-limit, limit).to(dtype)
    scales = round_entries(entries)[1].float()[..., None]
    error = (rounded(entries).float() - entries.float()).abs()
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # between neighbouring numbers of the type
    assert (error <= scales / 2 + ROUNDED_ONCE[dtype] * 127 * scales + least / 2).all()


def test_zeros_stay_zero_and_large_values_finite() -> None:
    assert torch.equal(rounded(torch.zeros(2, WIDTH)), torch.zeros(2, WIDTH))
    assert torch.isfinite(rounded(torch.full((1, WIDTH), torch.finfo(torch.float32).max / 2))).all()


@given(cuts=st.sets(st.integers(1, 29)), seed=st.integers(0, 9))
@settings(max_examples=share(40), deadline=None)
def test_however_tokens_arrive_attention_sees_the_same_rounded_entries(cuts: set[int], seed: int) -> None:
    query, key, value = a_text(30, seed)
    edges = [0, *sorted(cuts), 30]
    lengths = [end - start for start, end in itertools.pairwise(edges)]
    pieces, whole = a_cache(8), a_cache(8)
    out = run(pieces, (query, key, value), lengths)
    run(whole, (query, key, value), [30])
    batches = [cache.plan([Segment(0, 29, 1, 1)]) for cache in (pieces, whole)]
    pages = torch.tensor(batches[0].spans[0].pages)
    held = [batch.layers[0].gather(pages)[:, :, :30] for batch in batches]
    assert torch.equal(held[0], held[1])
    assert torch.equal(held[0], torch.stack((rounded(key), rounded(value))))
    exact = run(a_cache(16), (query, rounded(key), rounded(value)), lengths)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=0)


@given(seed=st.integers(0, 30), power=st.integers(-2, 2))
@settings(max_examples=share(30), deadline=None)
def test_the_error_of_attention_is_bounded(seed: int, power: int) -> None:
    """Scores move by at most e = scale |q|_1 step_k / 2, so weights by a factor within exp(+-2e), and values by step_v / 2."""
    query, key, value = a_text(20, seed)
    key = key * 2.0**power
    out, exact = (run(a_cache(bits), (query, key, value), [20]) for bits in (8, 16))
    half_key, half_value = (float(round_entries(each)[1].float().max()) / 2 for each in (key, value))
    moved = RULE.scale * query.abs().sum(-1).t() * half_key  # [tokens, heads]
    bound = half_value + (torch.expm1(2 * moved)) * float(value.abs().max())
    assert ((out - exact).abs() <= bound[..., None] + 1e-5).all()


def test_what_is_written_again_has_scales_of_its_own() -> None:
    text = a_text(20)
    cache = a_cache(8)
    run(cache, text, [11])
    other = tuple(part * 5 for part in text)
    start, length = 9, 4
    query, key, value = (part[:, start : start + length] for part in other)
    out = attend(cache.plan([Segment(0, start, length, 1)]), 0, query, key, value, RULE)
    mixed = tuple(torch.cat((own[:, :9], new[:, 9:]), dim=1) for own, new in zip(text, other, strict=True))
    torch.testing.assert_close(out, run(a_cache(8), mixed, [9, 4], sequence=5)[9:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("compute", sorted(COMPUTE_DTYPES))
@pytest.mark.parametrize("kv_bits", KV_BITS)
def test_the_pool_takes_what_the_contract_counts(kv_bits: int, compute: ComputeType) -> None:
    cache = a_cache(kv_bits, COMPUTE_DTYPES[compute], layers=3)
    assert cache.bytes == 3 * 40 * 4 * kv_token_bytes(kv_bits, KV_HEADS, WIDTH, compute)
