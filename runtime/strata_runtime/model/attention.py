"""Attention over paged keys and values for one packed batch: the reference path, right on every device.

Called once per layer by the loading adapter. Knows no model: queries, keys and values come with their positions applied.
All queries of a key head are handled together, so that keys and values are never repeated for grouped queries.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from strata_runtime.model.kv.batch import Batch, ChunkPart, DecodePart, Part
from strata_runtime.model.kv.pool import LayerPool

SCORES_BYTES = 8 << 20  # of soft-capped scores at once
MASK_BYTES = 4 << 20  # of a chunk's mask in the compute type at once
_ROWS_TOGETHER = 256  # what torch's kernel takes at once of long chunks
_WIDE = 256  # of padded keys and rows
_FEWEST_ROWS, _FEWEST_KEYS = 16, 64  # fewer are padded to these: they cost no more, and numbers of kernels do
_SCORE_BYTES = 10  # a score in the compute type, in float32 before and after the softmax


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer makes of softmax(scale * q k) v: its scale, how far back it sees, the cap on its scores (tanh)."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


def attend(
    batch: Batch, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Store the new keys and values of `layer` (its global number), then let every token see its sequence.

    query: [heads, tokens, head_dim]; key, value: [kv_heads, tokens, head_dim]. Returns [tokens, heads, head_dim].
    """
    pool = batch.layers[layer - batch.first_layer]
    key, value = pool.store(batch.places, key, value)
    parts = batch.parts(rule.window)
    first = parts[0]
    if len(parts) == 1 and isinstance(first, DecodePart) and first.rows is None:
        return _decode(first, pool, query, rule)
    out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    for part in parts:
        if isinstance(part, DecodePart):
            assert part.rows is not None
            chosen = query.index_select(1, part.rows)
            out[part.rows] = _decode(part, pool, chosen, rule)
        else:
            own = (key[:, part.rows], value[:, part.rows])
            out[part.rows] = _chunk(part, pool, (query[:, part.rows], *own), rule)
    return out


def kernel_sizes(batch: Batch, rules: Iterable[AttentionRule]) -> set[tuple[int, int]]:
    """The (rows, keys) that oneDNN keeps kernels for after a step of 16-bit soft-capped attention on a processor; rows 0: a sequence that decodes."""
    windows = {rule.window for rule in rules if rule.soft_cap is not None}
    return {_padded_shape(part) for window in windows for part in batch.parts(window)}


def _padded_shape(part: Part) -> tuple[int, int]:
    keys = _few_keys(part.keys.stop - part.keys.start)
    return (0 if isinstance(part, DecodePart) else _few_rows(part.rows.stop - part.rows.start)), keys


def _decode(part: DecodePart, pool: LayerPool, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """query: [heads, B, head_dim] -> [B, heads, head_dim]."""
    heads, count, width = query.shape
    kv_heads = pool.shape.kv_heads
    gathered = pool.gather(part.pages).view(2, kv_heads, count, -1, width)
    keys, values = gathered[:, :, :, part.keys].transpose(1, 2).unbind(0)
    grouped = query.transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, width)
    if heads == kv_heads and query.dtype is not torch.float32 and not query.is_cuda:
        # A single row goes through torch's 16-bit matrix-vector product, which takes three times as long as two rows.
        grouped = grouped.expand(-1, -1, 2, -1)
        return _softmax_attention(grouped, keys, values, part.mask, rule)[:, :, 0]
    return _softmax_attention(grouped, keys, values, part.mask, rule).reshape(count, heads, width)


def _chunk(
    part: ChunkPart,
    pool: LayerPool,
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rule: AttentionRule,
) -> torch.Tensor:
    """own: the chunk's query [heads, n, head_dim], key and value [kv_heads, n, head_dim] -> [n, heads, head_dim]."""
    query, key, value = own
    if part.pages is not None:
        key, value = pool.gather(part.pages)[:, :, part.keys].unbind(0)
    attended = [
        _softmax_attention(query[None, :, rows], key[None], value[None], mask, rule, causal=mask is None)
        for rows, mask in _masked_rows(query.shape[1], part.mask, query.element_size())
    ]
    out = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
    return out[0].transpose(0, 1)


def _masked_rows(
    tokens: int, mask: torch.Tensor | None, element_bytes: int
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """All rows, or some at a time: torch's kernel makes a copy of a mask [n, keys] in the compute type, which grows with the context."""
    if mask is None:
        yield slice(0, tokens), None
        return
    at_a_time = max(1, MASK_BYTES // (mask.shape[-1] * element_bytes) // _ROWS_TOGETHER) * _ROWS_TOGETHER
    for start in range(0, tokens, at_a_time):
        rows = slice(start, min(start + at_a_time, tokens))
        yield rows, mask[rows]


def _softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rule: AttentionRule,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """query: [B, heads, n, head_dim]; keys, values: [B, kv_heads, keys, head_dim]; mask broadcasts to [B, 1, n, keys]."""
    if rule.soft_cap is not None:
        return _soft_capped(query, keys, values, mask, rule, causal=causal)
    return functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=rule.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _soft_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rule: AttentionRule,
    *,
    causal: bool,
) -> torch.Tensor:
    """The same with cap * tanh(scores / cap) before the softmax, which the fused kernels do not know (Gemma 2).

    Some rows of queries at a time: the scores of a whole chunk would outgrow everything else a step holds.
    """
    tokens = query.shape[2]
    if causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if query.device.type == "cpu" and query.dtype is not torch.float32:
        if query.shape[0] > 1:
            return _one_by_one(query, keys, values, mask, rule)
        query, keys, values, mask = _in_few_shapes(query, keys, values, mask)
        return _soft_capped_slices(query, keys, values, mask, rule)[:, :, :tokens]
    return _soft_capped_slices(query, keys, values, mask, rule)


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
            _soft_capped(query[one], keys[one], values[one], own, rule, causal=False)
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
    rows, columns = _few_rows(tokens) - tokens, _few_keys(seen) - seen
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


def _few_rows(rows: int) -> int:
    return max(_FEWEST_ROWS, _few(rows))


def _few_keys(keys: int) -> int:
    return max(_FEWEST_KEYS, _few(keys))


def _few(size: int) -> int:
    """The next power of two, beyond 256 the next multiple of it."""
    return 1 << (size - 1).bit_length() if size <= _WIDE else -(-size // _WIDE) * _WIDE


def _soft_capped_slices(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    count, heads, tokens, _ = query.shape
    at_a_time = max(1, SCORES_BYTES // (count * heads * keys.shape[2] * _SCORE_BYTES))
    at_a_time = 1 << (at_a_time.bit_length() - 1)
    out = torch.empty_like(query)
    for start in range(0, tokens, at_a_time):
        rows = slice(start, start + at_a_time)
        seen = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        out[:, :, rows] = _soft_capped_rows(query[:, :, rows], keys, values, seen, rule)
    return out


def _soft_capped_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    assert rule.soft_cap is not None
    count, heads, tokens, width = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(count, kv_heads, -1, width)
    scores = (grouped @ keys.transpose(-1, -2)).view(count, heads, tokens, -1).mul_(rule.scale / rule.soft_cap)
    scores = scores.tanh_().mul_(rule.soft_cap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights.view(count, kv_heads, -1, keys.shape[2]) @ values).view(count, heads, tokens, width)
