# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917 -- arguments of kernels have no Python types; their constants are in capitals
"""The GPU kernels over bit-planes, in Triton. Launched by `triton_products`; imports Triton, so it is imported only where a kernel runs.

A program holds 32 rows of the weight and walks over its share of the tiles of 512 columns, reading only as many planes as the format has
(Any-Precision LLM, arXiv 2402.10517, section 5). Values go straight to the tensor cores, 8 or 16 tokens wide, with float32 sums: the
layout of planes gives every thread the codes of the columns that its fragment of the matrix product wants, so that up to 6 bits
nothing passes through shared memory but planes and activations on their way in. The order of sums does not depend on the number of tokens.
Shares of one row are added in their order by a second kernel: no atomics, the same bits every time.

| bits    | a value is found                                                           |
|---------|----------------------------------------------------------------------------|
| 3 ... 6 | in registers (`triton_bits`)                                               |
| 7, 8    | in the program's tables, in shared memory                                  |
| GPTQ    | from its code, zero and scale, rounded to the compute type as the reference |
"""

import triton
import triton.language as tl

from strata_runtime.kernels.triton_bits import (
    add_products,
    bytes_of_codes,
    bytes_of_table,
    floats_of_bytes,
    halves_of_bytes,
    looked_up,
    nibbles,
    pairs_of_bits,
    permute,
    selectors_of_side,
    selectors_of_three,
    shifted_right,
    split_bytes,
    split_halves,
)


@triton.jit
def load_words(planes, offsets, there, FULL: tl.constexpr, BITS: tl.constexpr):
    """The words of a tile, the least significant plane first, [R, 16] each, zeros beyond `there` of them."""
    mask = None if FULL else (tl.arange(0, 16) < there)[None, :]
    other = None if FULL else 0
    words = (tl.load(planes[BITS - 1] + offsets, mask=mask, other=other).to(tl.uint32, bitcast=True),)
    for place in tl.static_range(1, BITS):
        words += (tl.load(planes[BITS - 1 - place] + offsets, mask=mask, other=other).to(tl.uint32, bitcast=True),)
    return words


@triton.jit
def opaque_powers(pointer, rows):
    """2^16, 2^30, 2^31 where no compiler sees that they are constants, or it would make the products shifts again."""
    two_16 = tl.load(pointer + rows[:, None], mask=rows[:, None] < 0, other=0x10000).to(tl.uint32, bitcast=True)
    return two_16, two_16 << 14, two_16 << 15


@triton.jit
def load_table(table, rows, BITS: tl.constexpr):
    """Two entries to a word, [R, 1] each."""
    pointer = table + rows[:, None] * (1 << (BITS - 1))
    words = (tl.load(pointer).to(tl.uint32, bitcast=True),)
    for i in tl.static_range(1, 1 << (BITS - 1)):
        words += (tl.load(pointer + i).to(tl.uint32, bitcast=True),)
    return words


@triton.jit
def selected_values(words, low, high, powers, j: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The values of 64 columns at bit j and at bit j + 4 of their bytes, [R, 64] each: lookups in registers."""
    by_16, by_2, by_1 = powers
    three = selectors_of_three(pairs_of_bits(words[0], words[1], by_1), words[2], j, by_1, by_2)
    three_above = shifted_right(three, by_16)
    sides, sides_above = (), ()
    for place in tl.static_range(3, BITS):
        side = selectors_of_side(words[place], j, by_1)
        sides += (side,)
        sides_above += (shifted_right(side, by_16),)
    low_0 = looked_up(low, three, sides, 0, BITS)
    high_0 = looked_up(high, three, sides, 0, BITS)
    low_1 = looked_up(low, three_above, sides_above, 0, BITS)
    high_1 = looked_up(high, three_above, sides_above, 0, BITS)
    first = split_halves(permute(low_0, high_0, 0x6240), permute(low_1, high_1, 0x6240), DTYPE)
    second = split_halves(permute(low_0, high_0, 0x7351), permute(low_1, high_1, 0x7351), DTYPE)
    return first, second


@triton.jit
def code_bytes(words, powers, j: tl.constexpr, BITS: tl.constexpr):
    """The codes of 64 columns at bit j and at bit j + 4 of their bytes, four to a word, [R, 16] each."""
    _, by_2, by_1 = powers
    none = words[0] & 0
    upper = (none, none)
    if BITS == 3:
        upper = pairs_of_bits(words[2], none, by_1)
    if BITS > 3:
        upper = pairs_of_bits(words[2], words[3], by_1)
    low = nibbles(pairs_of_bits(words[0], words[1], by_1), upper, j, by_2)
    high = none
    if BITS == 7:
        high = nibbles(pairs_of_bits(words[4], words[5], by_1), pairs_of_bits(words[6], none, by_1), j, by_2)
    if BITS == 8:
        high = nibbles(pairs_of_bits(words[4], words[5], by_1), pairs_of_bits(words[6], words[7], by_1), j, by_2)
    return bytes_of_codes(low, high)


@triton.jit
def half_codes(words, powers, half: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr):
    """The codes of half a tile, int32 [R, 256]: 64 of each of the bits 2 half, 2 half + 1, 2 half + 4, 2 half + 5."""
    first_0, second_0 = code_bytes(words, powers, 2 * half, BITS)
    first_1, second_1 = code_bytes(words, powers, 2 * half + 1, BITS)
    pairs = tl.join(tl.join(first_0, second_0), tl.join(first_1, second_1)).reshape(ROWS, 64)  # by word, above, j
    by_word = split_bytes(pairs).to(tl.int32, bitcast=True).reshape(ROWS, 16, 2, 2, 4)
    return tl.permute(by_word, (0, 2, 3, 1, 4)).reshape(ROWS, 256)


@triton.jit
def half_columns(half: tl.constexpr, width):
    """The place in its tile of each column of `half_codes`."""
    slot = tl.arange(0, 256)
    return (slot // 128 * 4 + 2 * half + slot // 64 % 2) * width + slot % 64


@triton.jit
def load_entries(table, out_features, BITS: tl.constexpr, ROWS: tl.constexpr):
    """The program's tables one after the other, [ROWS * 2^BITS]."""
    entry = tl.program_id(0).to(tl.int64) * (ROWS << BITS) + tl.arange(0, ROWS << BITS)
    return tl.load(table + entry, mask=entry >> BITS < out_features, other=0.0)


@triton.jit
def gathered_values(words, entries, powers, half: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, 256] of half a tile: lookups in shared memory."""
    index = half_codes(words, powers, half, ROWS, BITS) + (tl.arange(0, ROWS) << BITS)[:, None]
    return tl.gather(entries, index.reshape(ROWS * 256), axis=0).reshape(ROWS, 256)


@triton.jit
def group_values(code_words, scales, zeros, rows, start, groups, SPLIT_GROUPS: tl.constexpr, DTYPE: tl.constexpr):
    """(code - zero) * scale, rounded once to DTYPE, [R, 64] from column `start` on."""
    column = start + tl.arange(0, 64 if SPLIT_GROUPS else 1)[None, :]
    offsets = rows.to(tl.int64)[:, None] * groups[0] + tl.minimum(column // groups[1], groups[0] - 1)
    zero, scale = tl.load(zeros + offsets), tl.load(scales + offsets)
    if tl.float16 == DTYPE:  # one rounding either way: code - zero is exact
        return (halves_of_bytes(code_words) - (zero.to(tl.float16) + 1024.0)) * scale
    else:  # noqa: RET505
        exact = floats_of_bytes(code_words) - (zero.to(tl.float32) + 8388608.0)
        return (exact * scale.to(tl.float32)).to(DTYPE)


@triton.jit
def load_tokens(pointers, start, slot, width, sizes, FULL: tl.constexpr, TOKENS: tl.constexpr):
    """Activations of the columns start + slot, [slots, TOKENS]; zeros beyond `width` slots, the inputs and the tokens.

    pointers: of column 0 and its neighbours; sizes: (M, K); FULL: no column is beyond.
    """
    count, in_features = sizes
    inside = (tl.arange(0, TOKENS) < count)[None, :]
    if not FULL:
        inside = inside & ((slot < width) & (start + slot < in_features))[:, None]
    return tl.load(pointers + start, mask=inside, other=0.0)


@triton.jit
def token_pointers(tokens, tokens_stride, column, TOKENS: tl.constexpr):
    return tokens + tl.arange(0, TOKENS).to(tl.int64)[None, :] * tokens_stride + column[:, None]


@triton.jit
def store_sums(out, sums, rows, sizes, TOKENS: tl.constexpr):
    """[R, TOKENS] to the place of this share in out [shares, M, N], in out's type."""
    count, out_features = sizes
    token = tl.arange(0, TOKENS)[None, :]
    pointers = out + (tl.program_id(1).to(tl.int64) * count + token) * out_features + rows[:, None]
    inside = (token < count) & (rows < out_features)[:, None]
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def selected_tile(
    sums, plane_pointers, token_base, table, powers, tile, words, sizes,
    BITS: tl.constexpr, FULL: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The sums with one tile added; plane_pointers: (planes, offsets of the tile's rows), table: (low bytes, high bytes)."""
    planes, offsets = plane_pointers
    there = words - tile * 16
    width = 64 if FULL else tl.multiple_of(there * 4, 8)
    found = load_words(planes, offsets + tile * 16, there, FULL, BITS)
    slot = tl.arange(0, 64)
    for j in tl.static_range(4):
        values, values_above = selected_values(found, table[0], table[1], powers, j, BITS, DTYPE)
        start, start_above = tile * 512 + j * width, tile * 512 + (j + 4) * width
        sums = add_products(values, load_tokens(token_base, start, slot, width, sizes, FULL, TOKENS), sums)
        sums = add_products(values_above, load_tokens(token_base, start_above, slot, width, sizes, FULL, TOKENS), sums)
    return sums


@triton.jit
def selected_product(
    tokens, tokens_stride, planes, row_words, words, table, out, sizes, share,
    BITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """3 to 6 bits. tokens [M, K]; planes: int32 [N, words] each, rows row_words apart; table: int32 [N, 2^(BITS-1)]; sizes: (M, N, K).

    FULL: all tiles are whole and K has no padding.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(rows, sizes[1] - 1)
    halves = bytes_of_table(load_table(table, held, BITS), BITS)
    powers = opaque_powers(table, held)
    bases = planes, held.to(tl.int64)[:, None] * row_words + tl.arange(0, 16)[None, :]
    token_base = token_pointers(tokens, tokens_stride, tl.arange(0, 64), TOKENS)
    limits = sizes[0], sizes[2]
    sums = tl.full((ROWS, TOKENS), 0.0, tl.float32)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, (words + 15) // 16)
    whole = last if FULL else tl.minimum(last, sizes[2] // 512)
    for tile in range(first, whole):
        sums = selected_tile(
            sums, bases, token_base, halves, powers, tile, words, limits, BITS, True, TOKENS, tokens.dtype.element_ty
        )
    if not FULL:  # noqa: SIM102 -- decided when compiled, the next one on the device
        if whole < last:
            sums = selected_tile(
                sums,
                bases,
                token_base,
                halves,
                powers,
                whole,
                words,
                limits,
                BITS,
                False,
                TOKENS,
                tokens.dtype.element_ty,
            )
    store_sums(out, sums, rows, (sizes[0], sizes[1]), TOKENS)


@triton.jit
def gathered_product(
    tokens, tokens_stride, planes, row_words, words, table, out, sizes, share,
    BITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """7 and 8 bits; as `selected_product`, but table: [N, 2^BITS] in the compute type."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(rows, sizes[1] - 1)
    entries = load_entries(table, sizes[1], BITS, ROWS)
    powers = opaque_powers(planes[0], held)
    offsets = held.to(tl.int64)[:, None] * row_words + tl.arange(0, 16)[None, :]
    sums = tl.full((ROWS, TOKENS), 0.0, tl.float32)
    slot = tl.arange(0, 256)
    first = tl.program_id(1) * share
    for tile in range(first, tl.minimum(first + share, (words + 15) // 16)):
        there = tl.minimum(words - tile * 16, 16)
        width = 64 if FULL else tl.multiple_of(there * 4, 8)
        found = load_words(planes, offsets + tile * 16, there, FULL, BITS)
        for half in tl.static_range(2):
            values = gathered_values(found, entries, powers, half, BITS, ROWS)
            column = half_columns(half, width)
            base = token_pointers(tokens, tokens_stride, column, TOKENS)
            limit = tl.where(slot % 64 < width, 512, 0)
            inputs = load_tokens(base, tile * 512, column, limit, (sizes[0], sizes[2]), FULL, TOKENS)
            sums = add_products(values, inputs, sums)
    store_sums(out, sums, rows, (sizes[0], sizes[1]), TOKENS)


@triton.jit
def group_product(
    tokens, tokens_stride, planes, row_words, words, scales, zeros, groups, out, sizes, share,
    BITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, FULL: tl.constexpr, SPLIT_GROUPS: tl.constexpr,
):  # fmt: skip
    """GPTQ. scales: float16 [N, G], zeros: uint8 [N, G]; groups: (G, inputs of one); SPLIT_GROUPS: some run of columns is in several."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(rows, sizes[1] - 1)
    powers = opaque_powers(planes[0], held)
    offsets = held.to(tl.int64)[:, None] * row_words + tl.arange(0, 16)[None, :]
    token_base = token_pointers(tokens, tokens_stride, tl.arange(0, 64), TOKENS)
    sums = tl.full((ROWS, TOKENS), 0.0, tl.float32)
    slot = tl.arange(0, 64)
    first = tl.program_id(1) * share
    for tile in range(first, tl.minimum(first + share, (words + 15) // 16)):
        there = tl.minimum(words - tile * 16, 16)
        width = 64 if FULL else tl.multiple_of(there * 4, 8)
        found = load_words(planes, offsets + tile * 16, there, FULL, BITS)
        for j in tl.static_range(4):
            pair = code_bytes(found, powers, j, BITS)
            for above in tl.static_range(2):
                start = tile * 512 + (j + 4 * above) * width
                values = group_values(
                    pair[above], scales, zeros, held, start, groups, SPLIT_GROUPS, tokens.dtype.element_ty
                )
                inputs = load_tokens(token_base, start, slot, width, (sizes[0], sizes[2]), FULL, TOKENS)
                sums = add_products(values, inputs, sums)
    store_sums(out, sums, rows, (sizes[0], sizes[1]), TOKENS)


@triton.jit
def add_shares(partial, out, size, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """partial: float32 [SHARES, size] -> out [size], added in their order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pointers = partial + place
    total = tl.load(pointers, mask=place < size, other=0.0)
    for _ in tl.static_range(1, SHARES):
        pointers += size
        total += tl.load(pointers, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def load_tile(planes, rows, row_words, words, BITS: tl.constexpr):
    """The words of this program's tile, and how many columns share a bit there."""
    tile = tl.program_id(1)
    there = tl.minimum(words - tile * 16, 16)
    offsets = rows.to(tl.int64)[:, None] * row_words + (tile * 16 + tl.arange(0, 16))[None, :]
    return load_words(planes, offsets, there, False, BITS), tl.multiple_of(there * 4, 8)


@triton.jit
def store_values(out, values, rows, column, in_tile, sizes):
    out_features, in_features = sizes
    pointers = out + rows.to(tl.int64)[:, None] * in_features + column[None, :]
    tl.store(pointers, values, mask=(rows < out_features)[:, None] & (in_tile & (column < in_features))[None, :])


@triton.jit
def selected_decode(
    planes, row_words, words, table, out, sizes, BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """3 to 6 bits, one tile of ROWS rows; table as in `selected_product`, out: [N, K]; sizes: (N, K)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(rows, sizes[0] - 1)
    low, high = bytes_of_table(load_table(table, held, BITS), BITS)
    powers = opaque_powers(table, held)
    found, width = load_tile(planes, held, row_words, words, BITS)
    slot = tl.program_id(1) * 512 + tl.arange(0, 64)
    for j in tl.static_range(4):
        values, values_above = selected_values(found, low, high, powers, j, BITS, out.dtype.element_ty)
        store_values(out, values, rows, slot + j * width, tl.arange(0, 64) < width, sizes)
        store_values(out, values_above, rows, slot + (j + 4) * width, tl.arange(0, 64) < width, sizes)


@triton.jit
def gathered_decode(
    planes, row_words, words, table, out, sizes, BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """7 and 8 bits, one tile of ROWS rows; table as in `gathered_product`, out: [N, K]; sizes: (N, K)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(rows, sizes[0] - 1)
    entries = load_entries(table, sizes[0], BITS, ROWS)
    found, width = load_tile(planes, held, row_words, words, BITS)
    powers = opaque_powers(planes[0], held)
    for half in tl.static_range(2):
        values = gathered_values(found, entries, powers, half, BITS, ROWS)
        column = tl.program_id(1) * 512 + half_columns(half, width)
        store_values(out, values, rows, column, tl.arange(0, 256) % 64 < width, sizes)


@triton.jit
def group_decode(
    planes, row_words, words, scales, zeros, groups, out, sizes,
    BITS: tl.constexpr, ROWS: tl.constexpr, SPLIT_GROUPS: tl.constexpr,
):  # fmt: skip
    """GPTQ, one tile of ROWS rows, as `group_product`; out: [N, K]; sizes: (N, K)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = tl.minimum(rows, sizes[0] - 1)
    powers = opaque_powers(planes[0], held)
    found, width = load_tile(planes, held, row_words, words, BITS)
    for j in tl.static_range(4):
        pair = code_bytes(found, powers, j, BITS)
        for above in tl.static_range(2):
            start = tl.program_id(1) * 512 + (j + 4 * above) * width
            values = group_values(pair[above], scales, zeros, held, start, groups, SPLIT_GROUPS, out.dtype.element_ty)
            store_values(out, values, rows, start + tl.arange(0, 64), tl.arange(0, 64) < width, sizes)
