"""Scores written out in 16 bits on a CPU: padded to few shapes, and nothing of the padding is seen."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import Segment
from strata_planner.costs.working import _key_numbers
from strata_runtime.model import written_scores
from strata_runtime.model.attention import _softmax_attention, attend, kernel_sizes
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv.batch import Batch
from strata_runtime.model.written_scores import _FEWEST_KEYS, _few, _slices
from tests.laws import share
from tests.runtime.dealt import DealtCache

_TERMS = torch.linspace(-1.0, 1.0, 8)[:, None, None]
RULES = {
    "soft cap": AttentionRule(scale=0.125, soft_cap=30.0),
    "slopes": AttentionRule(scale=0.125, slopes=_TERMS / 8),
    "sinks": AttentionRule(scale=0.125, sinks=_TERMS),
}
SHAPES = {  # sequences, new tokens, keys
    "decoding": (3, 1, 37),
    "a prompt": (1, 45, 45),
    "a chunk with a past": (1, 300, 700),
    "decoding beside longer ones": (2, 1, 257),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("count", "tokens", "keys"), SHAPES.values(), ids=SHAPES)
def test_padding_is_never_seen(count: int, tokens: int, keys: int, rule: AttentionRule) -> None:
    torch.manual_seed(0)
    query = torch.randn(count, 8, tokens, 64).to(torch.bfloat16)
    key, value = (torch.randn(count, 4, keys, 64).to(torch.bfloat16) for _ in range(2))
    causal = 1 < tokens == keys
    sees = torch.arange(keys)[None] <= torch.arange(tokens)[:, None] + keys - tokens
    found = _softmax_attention(query, key, value, None if causal or tokens == 1 else sees, rule, causal=causal)
    exact = _slices(query.float(), key.float(), value.float(), sees if tokens > 1 else None, rule)
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_group_is_answered_as_each_of_its_sequences_alone(rule: AttentionRule) -> None:
    torch.manual_seed(1)
    query = torch.randn(3, 8, 1, 64).to(torch.bfloat16)
    key, value = (torch.randn(3, 4, 48, 64).to(torch.bfloat16) for _ in range(2))
    mask = (torch.arange(48) < torch.tensor([[48], [20], [33]]))[:, None, None]
    found = _softmax_attention(query, key, value, mask, rule)
    for place, seen in enumerate((48, 20, 33)):
        own = (query[place : place + 1], key[place : place + 1, :, :seen], value[place : place + 1, :, :seen])
        torch.testing.assert_close(found[place : place + 1], _softmax_attention(*own, None, rule), rtol=0.02, atol=0.02)


def test_a_growing_sequence_meets_few_shapes() -> None:
    assert len({_few(size) for size in range(1, 4097)}) == 8 + 16
    assert all(size <= _few(size) < size + max(size, 256) for size in range(1, 4097))
    for most in (1, 2, 64, 65, 255, 256, 257, 1012):
        assert _key_numbers(most) == len({max(_FEWEST_KEYS, _few(size)) for size in range(1, most + 1)})


Shapes = set[tuple[torch.Size, torch.Size]]


@settings(deadline=None, max_examples=share(25))
@given(
    steps=st.lists(
        st.dictionaries(st.integers(0, 3), st.sampled_from([1, 2, 17, 70, 300]), min_size=1), min_size=2, max_size=8
    ),
    windows=st.sets(st.sampled_from([None, 20, 100]), min_size=1),
)
def test_no_step_of_sizes_that_were_met_has_new_products(steps: list[dict[int, int]], windows: set[int | None]) -> None:
    """Else kernels would be made, and kept, amid what a step has alive."""
    rules = [AttentionRule(0.3, window, soft_cap=5.0) for window in windows]
    cache, written = _a_cache(), dict.fromkeys(range(4), 0)
    met: set[tuple[int, int]] = set()
    known: Shapes = set()
    for step in steps:
        segments = [
            Segment(sequence, written[sequence], length, 1)
            for sequence, length in step.items()
            if written[sequence] + length <= 600
        ]
        if not segments:
            continue
        written |= {each.sequence: each.start + each.length for each in segments}
        batch = cache.plan(segments)
        found = _products(batch, rules)
        sizes = kernel_sizes(batch, rules)
        assert found <= known or not sizes <= met
        met |= sizes
        known |= found


def test_without_soft_caps_there_is_nothing_to_keep() -> None:
    batch = _a_cache().plan([Segment(0, 0, 5, 1)])
    assert kernel_sizes(batch, [AttentionRule(0.3), AttentionRule(0.3, window=20)]) == set()


def _products(batch: Batch, rules: list[AttentionRule]) -> Shapes:
    """The shapes of queries and keys that a step multiplies."""
    found: Shapes = set()
    plain = written_scores._rows

    def noted(query: torch.Tensor, keys: torch.Tensor, *others: Any) -> torch.Tensor:
        found.add((query.shape, keys.shape))
        return plain(query, keys, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_scores, "_rows", noted)
        for rule in rules:
            attend(batch, 0, *_drawn(batch.tokens), rule)
    return found


def _a_cache() -> DealtCache:
    return DealtCache(
        num_layers=1,
        first_layer=0,
        pages=200,
        page_tokens=16,
        kv_heads=2,
        head_dim=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def _drawn(tokens: int) -> list[torch.Tensor]:
    """Queries of four heads, keys and values of two."""
    return [torch.randn(heads, tokens, 8).to(torch.bfloat16) for heads in (4, 2, 2)]
