"""Attention with its scores written out, for what the fused kernels do not know: soft caps (Gemma 2), ALiBi (BLOOM), sinks (gpt-oss).

Used by `attention`. Some rows of queries at a time: the scores of a whole chunk would outgrow everything else a step holds.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from strata_runtime.model.attention_rule import AttentionRule

SCORES_BYTES = 8 << 20  # of scores at once
_WIDE = 256  # of padded keys and rows
_FEWEST_ROWS, _FEWEST_KEYS = 16, 64  # fewer are padded to these: they cost no more, and numbers of kernels do
_SCORE_BYTES = 10  # a score in the compute type, in float32 before and after the softmax


def written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rule: AttentionRule,
    *,
    causal: bool,
) -> torch.Tensor:
    """query: [B, heads, n, head_dim]; keys, values: [B, kv_heads, keys, head_dim]; mask broadcasts to [B, 1, n, keys].

    The rule's terms of each head are [heads, 1, 1], or [heads, n, 1] where rows are heads too.
    """
    tokens = query.shape[2]
    if causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if query.device.type == "cpu" and query.dtype is not torch.float32:
        if query.shape[0] > 1:
            return _one_by_one(query, keys, values, mask, rule)
        query, keys, values, mask = _in_few_shapes(query, keys, values, mask)
        return _slices(query, keys, values, mask, _of_rows(rule, query.shape[2]))[:, :, :tokens]
    return _slices(query, keys, values, mask, rule)


def _one_by_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    """Each sequence of a group by itself: their number would be one more that oneDNN keeps kernels for, and one sequence's padded
    copies are a fraction of the group's.
    """
    ones = [slice(place, place + 1) for place in range(query.shape[0])]
    masks = [None if mask is None else mask[one] for one in ones]
    return torch.cat(
        [
            written_out(query[one], keys[one], values[one], own, rule, causal=False)
            for one, own in zip(ones, masks, strict=True)
        ]
    )


def _in_few_shapes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and keys padded to few numbers, what is padded never seen: oneDNN keeps some 1.5 MiB for every pair of numbers that a
    16-bit product has had, and a sequence that grows has a new one with every token.
    """
    tokens, seen = query.shape[2], keys.shape[2]
    rows, columns = few_rows(tokens) - tokens, few_keys(seen) - seen
    if mask is None:
        mask = torch.ones(1, seen, dtype=torch.bool, device=query.device)
    mask = functional.pad(mask, (0, columns), value=False)
    if mask.shape[-2] > 1:
        mask = functional.pad(mask, (0, 0, 0, rows), value=True)
    return (
        functional.pad(query, (0, 0, 0, rows)),
        functional.pad(keys, (0, 0, 0, columns)),
        functional.pad(values, (0, 0, 0, columns)),
        mask,
    )


def few_rows(rows: int) -> int:
    return max(_FEWEST_ROWS, _few(rows))


def few_keys(keys: int) -> int:
    return max(_FEWEST_KEYS, _few(keys))


def _few(size: int) -> int:
    """The next power of two, beyond 256 the next multiple of it."""
    return 1 << (size - 1).bit_length() if size <= _WIDE else -(-size // _WIDE) * _WIDE


def _slices(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    count, heads, tokens, _ = query.shape
    at_a_time = max(1, SCORES_BYTES // (count * heads * keys.shape[2] * _SCORE_BYTES))
    at_a_time = 1 << (at_a_time.bit_length() - 1)
    out = torch.empty_like(query)
    for start in range(0, tokens, at_a_time):
        rows = slice(start, start + at_a_time)
        seen = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        out[:, :, rows] = _rows(query[:, :, rows], keys, values, seen, _of_rows(rule, tokens, rows))
    return out


def _rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    count, heads, tokens, width = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(count, kv_heads, -1, width)
    scores = (grouped @ keys.transpose(-1, -2)).view(count, heads, tokens, -1)
    if rule.soft_cap is None:
        scores.mul_(rule.scale)
    else:
        scores.mul_(rule.scale / rule.soft_cap).tanh_().mul_(rule.soft_cap)
    if rule.slopes is not None:
        scores = scores.float().add_(rule.slopes * _behind_last(keys))
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    weights = _weights(scores, rule.sinks).to(query.dtype)
    return (weights.view(count, kv_heads, -1, keys.shape[2]) @ values).view(count, heads, tokens, width)


def _behind_last(keys: torch.Tensor) -> torch.Tensor:
    """Positions of keys: the softmax sees only their differences, and small numbers are exact."""
    return torch.arange(1 - keys.shape[2], 1, device=keys.device, dtype=torch.float32)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax in float32; of a sink's share nothing is left."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True).float(), sinks)
    raised = scores.float().sub_(highest).exp_()
    return raised.div_(raised.sum(dim=-1, keepdim=True) + (sinks - highest).exp())


def _of_rows(rule: AttentionRule, tokens: int, rows: slice = slice(None)) -> AttentionRule:
    """The rule for some of `tokens` rows, where its terms of each head differ by row; beyond their rows there is padding."""
    terms = [each for each in (rule.slopes, rule.sinks) if each is not None]
    if all(each.shape[1] == 1 for each in terms):
        return rule
    slopes, sinks = (
        None if each is None else functional.pad(each, (0, 0, 0, max(0, tokens - each.shape[1])))[:, rows]
        for each in (rule.slopes, rule.sinks)
    )
    return replace(rule, slopes=slopes, sinks=sinks)
