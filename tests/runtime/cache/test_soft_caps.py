"""Soft-capped scores in 16 bits on a CPU: padded to few shapes, and nothing of the padding is seen."""

import pytest
import torch

from strata_planner.costs.working import _key_numbers
from strata_runtime.cache.attention import _FEWEST_KEYS, AttentionRule, _few, _soft_capped_slices, _softmax_attention

RULE = AttentionRule(scale=0.125, soft_cap=30.0)
SHAPES = {  # sequences, new tokens, keys
    "decoding": (3, 1, 37),
    "a prompt": (1, 45, 45),
    "a chunk with a past": (1, 300, 700),
    "decoding beside longer ones": (2, 1, 257),
}


@pytest.mark.parametrize(("count", "tokens", "keys"), SHAPES.values(), ids=SHAPES)
def test_padding_is_never_seen(count: int, tokens: int, keys: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(count, 8, tokens, 64).to(torch.bfloat16)
    key, value = (torch.randn(count, 4, keys, 64).to(torch.bfloat16) for _ in range(2))
    causal = 1 < tokens == keys
    sees = torch.arange(keys)[None] <= torch.arange(tokens)[:, None] + keys - tokens
    found = _softmax_attention(query, key, value, None if causal or tokens == 1 else sees, RULE, causal=causal)
    exact = _soft_capped_slices(query.float(), key.float(), value.float(), sees if tokens > 1 else None, RULE)
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)


def test_a_group_is_answered_as_each_of_its_sequences_alone() -> None:
    torch.manual_seed(1)
    query = torch.randn(3, 8, 1, 64).to(torch.bfloat16)
    key, value = (torch.randn(3, 4, 48, 64).to(torch.bfloat16) for _ in range(2))
    mask = (torch.arange(48) < torch.tensor([[48], [20], [33]]))[:, None, None]
    found = _softmax_attention(query, key, value, mask, RULE)
    for place, seen in enumerate((48, 20, 33)):
        own = (query[place : place + 1], key[place : place + 1, :, :seen], value[place : place + 1, :, :seen])
        torch.testing.assert_close(found[place : place + 1], _softmax_attention(*own, None, RULE), rtol=0.02, atol=0.02)


def test_a_growing_sequence_meets_few_shapes() -> None:
    assert len({_few(size) for size in range(1, 4097)}) == 8 + 16
    assert all(size <= _few(size) < size + max(size, 256) for size in range(1, 4097))
    for most in (1, 2, 64, 65, 255, 256, 257, 1012):
        assert _key_numbers(most) == len({max(_FEWEST_KEYS, _few(size)) for size in range(1, most + 1)})
