"""Attention over pages on a GPU, run by Triton's interpreter: plain attention over each sequence, whatever lies beside it in a step.

What a GPU alone can show is in `tests/gpu/test_attention_gpu.py`.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import Segment
from strata_runtime.kernels.native_attention import Entries, Scores
from strata_runtime.model import attention as model_attention
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv.rounding import restore, round_entries
from tests.laws import share
from tests.runtime.dealt import DealtCache
from tests.runtime.formats.interpreted import interpreter
from tests.runtime.kernels.paged_steps import PLAIN, PagedStep, attended

with interpreter():
    from strata_runtime.kernels import (
        paged_attention,
        triton_attention,  # noqa: F401 -- binds it
    )

RULES = [
    {},
    {"window": 5},
    {"window": 200, "soft_cap": 5.0},
    {"chunk": 64, "first": 3},
    {"slopes": True},
    {"sinks": True, "window": 64},
]


def with_terms(rule: dict[str, object], step: PagedStep) -> Scores:
    terms = {name: torch.linspace(-0.5, 0.5, step.heads) for name in ("slopes", "sinks") if rule.get(name)}
    return replace(PLAIN, scale=step.width**-0.5, **{**rule, **terms})  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_step_of_prompts_and_answers_is_plain_attention(rule: dict[str, object]) -> None:
    step = PagedStep([(130, 1), (3, 5), (0, 1)], heads=6, kv_heads=2, width=24, page_tokens=16)
    scores = with_terms(rule, step)
    torch.testing.assert_close(attended(step, scores), step.expected(scores), atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # the step above is in one part
def test_keys_in_parts_are_one_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "PART", 64)
    monkeypatch.setattr(paged_attention, "PARTS_BYTES", 4 * 4 * 4 * 18 * 2)  # of two tokens
    step = PagedStep([(200, 1), (64, 1), (63, 1), (0, 1), (70, 2)], heads=4, kv_heads=2, width=16, page_tokens=4)
    for rule in RULES:
        scores = with_terms(rule, step)
        torch.testing.assert_close(attended(step, scores), step.expected(scores), atol=1e-5, rtol=1e-5)


def test_entries_of_8_bits_are_what_the_pool_restores() -> None:
    for dtype in (torch.float32, torch.float16):
        step = PagedStep([(60, 1), (3, 4)], heads=4, kv_heads=2, width=32, page_tokens=16, dtype=dtype)
        (keys, key_scales), (values, value_scales) = (round_entries(each) for each in (step.keys, step.values))
        rounded = Entries(keys, values, (key_scales, value_scales))
        restored = Entries(restore(keys, key_scales, dtype), restore(values, value_scales, dtype))
        assert torch.equal(attended(step, PLAIN, rounded), attended(step, PLAIN, restored))


def test_what_a_token_gets_does_not_depend_on_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "PART", 64)
    step = PagedStep([(10, 1), (3, 5), (150, 1)], heads=4, kv_heads=2, width=16, page_tokens=16)
    whole = attended(step, PLAIN)
    for number, rows in enumerate((slice(0, 1), slice(1, 6), slice(6, 7))):
        assert torch.equal(attended(step.alone(number), PLAIN), whole[rows])


def test_entries_behind_a_sequence_are_never_seen() -> None:
    step = PagedStep([(9, 1), (3, 2)], heads=2, kv_heads=1, width=16, page_tokens=16)
    expected = attended(step, PLAIN)
    step.spoil_all_but(step.places(0) + step.places(1))
    assert torch.equal(attended(step, PLAIN), expected)


def test_the_cache_hands_its_pages_over_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam: a pool as GPUs have it, filled by steps, read by the kernel; at 8 bits what gathering gives."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randn(count, 40, 8, generator=generator) for count in (4, 2, 2)]
    found = {}
    for kv_bits, by_kernel in ((16, False), (16, True), (8, False), (8, True)):
        monkeypatch.setattr(paged_attention, "takes", lambda *_, answer=by_kernel: answer)
        cache = DealtCache(
            num_layers=2, first_layer=3, pages=16, page_tokens=4, kv_heads=2, head_dim=8, kv_bits=kv_bits,
            dtype=torch.float32, device=torch.device("cpu"), page_major=True,
        )  # fmt: skip
        outputs = []
        for segments in ([(0, 0, 9), (1, 0, 1)], [(1, 1, 1), (0, 9, 1), (2, 0, 5)], [(0, 10, 1), (2, 5, 1), (1, 2, 7)]):
            batch = cache.plan([Segment(number, start, length, 1) for number, start, length in segments])
            packed = [
                torch.cat([text[:, start + number : start + number + length] for number, start, length in segments], 1)
                for text in texts
            ]
            outputs.append(model_attention.attend(batch, 4, *packed, AttentionRule(0.3, window=6)))
        found[kv_bits, by_kernel] = torch.cat(outputs)
    for kv_bits in (16, 8):
        torch.testing.assert_close(found[kv_bits, True], found[kv_bits, False], atol=1e-5, rtol=1e-5)
    assert not torch.equal(found[8, True], found[16, True])


steps = st.builds(
    lambda spans, kv_heads, group, width, page, dtype, seed: PagedStep(
        spans, heads=kv_heads * group, kv_heads=kv_heads, width=width, page_tokens=page, dtype=dtype, seed=seed
    ),
    st.lists(
        st.tuples(st.sampled_from([0, 3, 17, 130, 600]), st.sampled_from([1, 1, 2, 5, 49, 70])), min_size=1, max_size=3
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([8, 64, 80, 256]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([torch.float32, torch.float16]),
    st.integers(0, 99),
)


@pytest.mark.slow
@settings(max_examples=share(60), deadline=None)
@given(steps, st.sampled_from(RULES))
def test_any_step_is_plain_attention(step: PagedStep, rule: dict[str, object]) -> None:
    scores = with_terms(rule, step)
    exact = 1e-4 if rule.get("slopes") else 1e-5  # slopes make scores of some hundreds, rounded to 3e-5
    tolerance = exact if step.query.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(attended(step, scores).float(), step.expected(scores), atol=tolerance, rtol=tolerance)
