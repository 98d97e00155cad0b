"""Attention over paged keys and values for one packed batch: over pages where they lie, by the native library or a GPU's kernels where they take
the batch, else in torch, right on every device.

Called once per layer by the loading adapter. Knows no model: queries, keys and values come with their positions applied.
In torch all queries of a key head are handled together, so that keys and values are never repeated for grouped queries.
"""

from collections.abc import Iterable, Iterator

import torch
from torch.nn import functional

from strata_runtime.kernels import native_attention, paged_attention
from strata_runtime.model.attention_rule import AttentionRule
from strata_runtime.model.kv.batch import Batch, ChunkPart, DecodePart, Part
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.model.written_scores import few_keys, few_rows, written_out

MASK_BYTES = 4 << 20  # of a chunk's mask in the compute type at once
_ROWS_TOGETHER = 256  # what torch's kernel takes at once of long chunks


def attend(
    batch: Batch, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Store the new keys and values of `layer` (its global number), then let every token see its sequence.

    query: [heads, tokens, head_dim]; key, value: [kv_heads, tokens, head_dim]. Returns [tokens, heads, head_dim].
    """
    pool = batch.layers[layer]
    key, value = pool.store(batch.places, key, value)
    if pool.entries is not None and native_attention.takes(query.dtype, query.device, query.shape[2]):
        return native_attention.attend(query, pool.entries, batch.native_spans, batch.page_tokens, rule.native)
    if pool.pages is not None and paged_attention.takes(query.dtype, query.device, query.shape[2]):
        tables = batch.tables(query.shape[0] // pool.shape.kv_heads)
        return paged_attention.attend(query, pool.pages, tables, batch.page_tokens, rule.native)
    parts = batch.parts(rule.reach)
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
    """The (rows, keys) that oneDNN keeps kernels for after a step of 16-bit attention with its scores written out on a processor; rows 0: a
    sequence that decodes.
    """
    reaches = {rule.reach for rule in rules if rule.written_out}
    return {_padded_shape(part) for reach in reaches for part in batch.parts(reach)}


def _padded_shape(part: Part) -> tuple[int, int]:
    keys = few_keys(part.keys.stop - part.keys.start)
    return (0 if isinstance(part, DecodePart) else few_rows(part.rows.stop - part.rows.start)), keys


def _decode(part: DecodePart, pool: LayerPool, query: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """query: [heads, B, head_dim] -> [B, heads, head_dim]."""
    heads, count, width = query.shape
    kv_heads = pool.shape.kv_heads
    gathered = pool.gather(part.pages).view(2, kv_heads, count, -1, width)
    keys, values = gathered[:, :, :, part.keys].transpose(1, 2).unbind(0)
    grouped = query.transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, width)
    rule = rule.with_heads_as(kv_heads, heads // kv_heads)
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
    rule = rule.with_heads_as(query.shape[0], 1)
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
    if rule.written_out:
        return written_out(query, keys, values, mask, rule, causal=causal)
    return functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=rule.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
