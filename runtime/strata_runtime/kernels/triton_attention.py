# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0915, PLR0917 -- arguments of kernels have no Python types; their constants are in capitals
"""Attention over pages on a GPU, in Triton. Launched by `paged_attention`; imports Triton, so it is imported only where it runs.

A program answers some tokens of one sequence for one key head: the queries of all heads that share it are rows of one product, so that
keys and values are read once. It walks over the sequence's pages where they lie, with a running softmax in float32 (FlashAttention,
arXiv 2205.14135). Tokens that decode have their keys in parts of a fixed length, each a program of its own, that a second kernel adds
in their order (Flash-Decoding): what a token gets does not depend on those beside it.
"""

import triton
import triton.language as tl


@triton.jit
def first_seen(positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr):
    """By the tokens at these positions, as `kv.batch.Reach` has it. WINDOW, CHUNK: 0 for none."""
    if CHUNK > 0:
        return tl.maximum(positions // CHUNK * CHUNK, FIRST)
    if WINDOW > 0:
        return tl.maximum(positions + 1 - WINDOW, FIRST)
    return positions * 0 + FIRST


@triton.jit
def restored(codes, scales, DTYPE: tl.constexpr):
    """int8 codes by their scales, rounded once to the compute type, as `kv.rounding.restore` does."""
    values = codes.to(tl.float32) * scales.to(tl.float32)[:, None]
    if tl.float16 == DTYPE:
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    return values.to(DTYPE)


@triton.jit
def product(left, right, EXACT: tl.constexpr):
    """Sums in float32. EXACT: float32 factors are not cut to the tensor cores' 19 bits."""
    if EXACT:
        return tl.dot(left, right, input_precision="ieee")
    return tl.dot(left, right)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """tanh(scores / CAP) * CAP, by an exponential that may overflow to infinity."""
    return CAP - 2 * CAP / (tl.exp(scores * (2 / CAP)) + 1)


@triton.jit
def attend_tiles(
    query,
    head_stride,
    token_stride,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    table_stride,
    tiles,
    slopes,
    scale,
    out,
    sums,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    CAP: tl.constexpr,
    SLOPES: tl.constexpr,
    SINKS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Program (tile, key head, part). query: [heads, tokens, WIDTH] by its strides; keys, values: [pages, PAGE, KV_HEADS, WIDTH], ROUNDED int8 with
    scales bfloat16 [pages, PAGE, KV_HEADS]; tables: int32 [sequences, table_stride] pages; tiles: int32 [tiles, 4]: first row in the batch, its
    position, how many tokens, number of its table.

    `slopes`: float32 [heads], or `sinks` of the same shape where SINKS. PART 0: the result goes to `out` [tokens, heads, WIDTH]. Else `out` is float32
    [tiles, heads, parts, WIDTH], not divided yet, and `sums` [tiles, heads, parts, 2] the greatest score and the sum of weights of each part.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(tiles + tile * 4)
    start = tl.load(tiles + tile * 4 + 1)
    count = tl.load(tiles + tile * 4 + 2)
    table = tables + tl.load(tiles + tile * 4 + 3) * table_stride

    places = tl.arange(0, ROWS)
    token = places // GROUP
    head = kv_head * GROUP + places % GROUP
    is_row = token < count
    positions = start + tl.minimum(token, count - 1)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    inside = is_row[:, None] & is_column[None, :]
    asked = tl.load(
        query
        + (head.to(tl.int64) * head_stride + (row + token).to(tl.int64) * token_stride)[:, None]
        + columns[None, :],
        mask=inside,
        other=0.0,
    )
    slope = tl.load(slopes + head, mask=is_row, other=0.0) if SLOPES else 0.0
    seen_from = first_seen(positions, WINDOW, CHUNK, FIRST)
    begin = first_seen(start, WINDOW, CHUNK, FIRST)
    end = start + count
    if PART > 0:
        begin = tl.maximum(begin, part * PART)
        end = tl.minimum(end, (part + 1) * PART)

    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.full([ROWS], 0.0, tl.float32)
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(begin // KEYS * KEYS, end, KEYS):
        key = first + tl.arange(0, KEYS)
        is_key = (key >= begin) & (key < end)
        page = tl.load(table + key // PAGE, mask=is_key, other=0).to(tl.int64)
        entry = (page * PAGE + key % PAGE) * KV_HEADS + kv_head
        offsets = entry[:, None] * WIDTH + columns[None, :]
        there = is_key[:, None] & is_column[None, :]
        own = tl.load(keys + offsets, mask=there, other=0)
        held = tl.load(values + offsets, mask=there, other=0)
        if ROUNDED:
            own = restored(own, tl.load(key_scales + entry, mask=is_key, other=0.0), asked.dtype)
            held = restored(held, tl.load(value_scales + entry, mask=is_key, other=0.0), asked.dtype)
        scores = product(asked, tl.trans(own), EXACT) * scale
        if CAP > 0:
            scores = capped(scores, CAP)
        if SLOPES:
            scores += slope[:, None] * (key[None, :] - positions[:, None]).to(tl.float32)
        seen = is_key[None, :] & (key[None, :] <= positions[:, None]) & (key[None, :] >= seen_from[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(greatest, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing was seen yet: no infinity less itself
        raised = tl.exp(scores - safe[:, None])
        kept = tl.exp(greatest - safe)
        weight = weight * kept + tl.sum(raised, 1)
        total = total * kept[:, None] + product(raised.to(asked.dtype), held, EXACT)
        greatest = new

    if PART > 0:
        parts = tl.num_programs(2)
        place = (tile * (KV_HEADS * GROUP) + head).to(tl.int64) * parts + part
        tl.store(out + place[:, None] * WIDTH + columns[None, :], total, mask=inside)
        tl.store(sums + place * 2, greatest, mask=is_row)
        tl.store(sums + place * 2 + 1, weight, mask=is_row)
    else:
        if SINKS:
            sink = tl.load(slopes + head, mask=is_row, other=0.0)
            new = tl.maximum(greatest, sink)
            kept = tl.exp(greatest - new)
            weight = weight * kept + tl.exp(sink - new)
            total = total * kept[:, None]
        result = total / tl.where(weight > 0, weight, 1.0)[:, None]  # rows of no token; tokens that see nothing
        place = (row + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(out + place[:, None] * WIDTH + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_parts(
    totals,
    sums,
    tiles,
    sinks,
    out,
    parts,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
    PART: tl.constexpr,
):
    """Program (tile, head): what `attend_tiles` left of one token's parts, in their order, to `out` [tokens, HEADS, WIDTH]."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tiles + tile * 4)
    used = tl.load(tiles + tile * 4 + 1) // PART + 1
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    first = (tile * HEADS + head).to(tl.int64) * parts
    greatest = tl.load(sinks + head) if SINKS else tl.full([], float("-inf"), tl.float32)
    weight = tl.full([], 1.0, tl.float32) if SINKS else tl.full([], 0.0, tl.float32)
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for part in range(used):
        own = tl.load(sums + (first + part) * 2)
        new = tl.maximum(greatest, own)
        safe = tl.where(new == float("-inf"), 0.0, new)
        kept, added = tl.exp(greatest - safe), tl.exp(own - safe)
        weight = weight * kept + tl.load(sums + (first + part) * 2 + 1) * added
        total = total * kept + tl.load(totals + (first + part) * WIDTH + columns, mask=is_column, other=0.0) * added
        greatest = new
    place = row.to(tl.int64) * HEADS + head
    result = total / tl.where(weight > 0, weight, 1.0)
    tl.store(out + place * WIDTH + columns, result.to(out.dtype.element_ty), mask=is_column)
