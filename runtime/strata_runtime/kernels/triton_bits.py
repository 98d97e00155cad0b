# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803 -- arguments of kernels have no Python types; their constants are in capitals
"""Words of bit-planes to values, in Triton: the pieces that `triton_kernels` is made of. Knows nothing of rows, tokens or memory.

A word is 32 bits of one plane: in a tile of w columns that starts at s, word q holds the bits of bytes j = 4q .. 4q+3, and bit b of byte j is
that of column s + b * w/8 + j (see `planes`). All words are uint32.

Bit-transpose (Any-Precision LLM, arXiv 2402.10517, section 5.3): four planes make, for j = 0 .. 3, a word of eight nibbles: nibble 2i + h is the code
of byte 4q + i at bit j + 4h, in 22 operations for 32 weights. So each j gives the codes of 64 neighbouring columns twice (h = 0, 1).

Table lookup: `prmt` picks four bytes out of eight by four selectors of three bits, the nibbles as they are: four lookups in a table of
eight entries that lies in two registers, without a memory access. Low and high bytes of the 16-bit entries are looked up apart and
interleaved. The paper keeps its tables in shared memory; one access per weight there, and its bank conflicts, cost more than these.
Right shifts are high halves of products: multiplications run beside `prmt`, whose unit is what this kernel saturates.
"""

import triton
import triton.language as tl


@triton.jit
def permute(low, high, selectors):
    """Byte i of the result is byte `selectors` >> 4i & 7 of the eight bytes low, high."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selectors], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def shifted_right(word, power):
    """word >> (32 - n) for power = 2^n, by a multiplication."""
    return tl.inline_asm_elementwise(
        "mul.hi.u32 $0, $1, $2;", "=r,r,r", [word, power], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def add_products(values, inputs, sums):
    """sums + values @ inputs in the tensor cores: exact products, float32 sums."""
    return tl.dot(values, inputs, sums)


@triton.jit
def pairs_of_bits(least, next_one, by_1):
    """The bits of two planes side by side: of even positions, of odd positions."""
    even = (least & 0x55555555) | ((next_one << 1) & 0xAAAAAAAA)
    odd = (shifted_right(least, by_1) & 0x55555555) | (next_one & 0xAAAAAAAA)
    return even, odd


@triton.jit
def nibbles(low_pairs, high_pairs, j: tl.constexpr, by_2):
    """Nibbles of 4-bit codes for one j, from the pairs of the two least significant planes and of the two above."""
    if j < 2:
        return (low_pairs[j] & 0x33333333) | ((high_pairs[j] << 2) & 0xCCCCCCCC)
    else:  # noqa: RET505
        return (shifted_right(low_pairs[j - 2], by_2) & 0x33333333) | (high_pairs[j - 2] & 0xCCCCCCCC)


@triton.jit
def selectors_of_three(low_pairs, third, j: tl.constexpr, by_1, by_2):
    """Nibbles of 3-bit codes for one j: what `permute` takes; its fourth bit must be 0."""
    if j == 0:
        return (low_pairs[0] & 0x33333333) | ((third << 2) & 0x44444444)
    elif j == 1:  # noqa: RET505
        return (low_pairs[1] & 0x33333333) | ((third << 1) & 0x44444444)
    elif j == 2:
        return (shifted_right(low_pairs[0], by_2) & 0x33333333) | (third & 0x44444444)
    else:
        return (shifted_right(low_pairs[1], by_2) & 0x33333333) | (shifted_right(third, by_1) & 0x44444444)


@triton.jit
def selectors_of_side(plane, j: tl.constexpr, by_1):
    """What makes `permute(zero, one, .)` take each byte from `one` where the plane has a bit, for one j."""
    if j == 0:
        return ((plane << 2) & 0x44444444) | 0x32103210
    elif j == 1:  # noqa: RET505
        return ((plane << 1) & 0x44444444) | 0x32103210
    elif j == 2:
        return (plane & 0x44444444) | 0x32103210
    else:
        return (shifted_right(plane, by_1) & 0x44444444) | 0x32103210


@triton.jit
def looked_up(table, selectors, sides, first: tl.constexpr, BITS: tl.constexpr):
    """One byte for each of the four low nibbles, from the 2^BITS entries of a byte, four to a word, that start at word `first`.

    sides: of the fourth bit and those above.
    """
    if BITS == 3:
        return permute(table[first], table[first + 1], selectors)
    else:  # noqa: RET505 -- a branch of constants: only one is compiled
        lower = looked_up(table, selectors, sides, first, BITS - 1)
        upper = looked_up(table, selectors, sides, first + (1 << (BITS - 3)), BITS - 1)
        return permute(lower, upper, sides[BITS - 4])


@triton.jit
def bytes_of_table(words, BITS: tl.constexpr):
    """words: two entries of 16 bits each -> the low bytes and the high bytes of the entries, four to a word."""
    low = (permute(words[0], words[1], 0x6420), permute(words[2], words[3], 0x6420))
    high = (permute(words[0], words[1], 0x7531), permute(words[2], words[3], 0x7531))
    for i in tl.static_range(4, 1 << (BITS - 1), 2):
        low += (permute(words[i], words[i + 1], 0x6420),)
        high += (permute(words[i], words[i + 1], 0x7531),)
    return low, high


@triton.jit
def bytes_of_codes(low_nibbles, high_nibbles):
    """The 8-bit codes of columns 4q .. 4q+3, one to a byte: of h = 0, of h = 1."""
    first = (low_nibbles & 0x0F0F0F0F) | ((high_nibbles & 0x0F0F0F0F) << 4)
    second = ((low_nibbles >> 4) & 0x0F0F0F0F) | (high_nibbles & 0xF0F0F0F0)
    return first, second


@triton.jit
def split_bytes(words):
    """[R, Q] of four bytes -> uint32 [R, 4Q]."""
    even = tl.join(words & 0xFF, (words >> 16) & 0xFF)
    odd = tl.join((words >> 8) & 0xFF, words >> 24)
    joined = tl.join(even, odd)
    return joined.reshape(joined.shape[0], joined.shape[1] * 4)


@triton.jit
def floats_of_bytes(words):
    """[R, Q] of four bytes -> float32 [R, 4Q]: 2^23 + byte, whose last bits are the byte's."""
    even = tl.join(permute(words, 0x4B000000, 0x7650), permute(words, 0x4B000000, 0x7652))
    odd = tl.join(permute(words, 0x4B000000, 0x7651), permute(words, 0x4B000000, 0x7653))
    joined = tl.join(even, odd)
    return joined.reshape(joined.shape[0], joined.shape[1] * 4).to(tl.float32, bitcast=True)


@triton.jit
def split_halves(first, second, DTYPE: tl.constexpr):
    """Two [R, Q] of two 16-bit values each -> DTYPE [R, 4Q], `first` before `second`."""
    words = tl.join(first, second)
    words = words.reshape(words.shape[0], words.shape[1] * 2)
    low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    values = tl.join(low, high)
    return values.reshape(values.shape[0], values.shape[1] * 2)


@triton.jit
def halves_of_bytes(words):
    """[R, Q] of four bytes -> float16 [R, 4Q]: 1024 + byte."""
    return split_halves(permute(words, 0x64646464, 0x4140), permute(words, 0x64646464, 0x4342), tl.float16)
