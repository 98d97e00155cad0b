"""How many rows a processor's products have: where oneDNN multiplies, steps are padded to few numbers of them.

oneDNN compiles and keeps a kernel for every number of rows of every linear, 0.7 MB each: steps of ever new sizes would fill the
memory. The runtime pads by this rule, the planner counts kernels by it. Where it does not multiply 16 bits nothing is kept, and nothing is padded
(`DeviceProfile.pads_rows`).
"""

from bisect import bisect_left

MANY_ROWS = 128
TOKENS_AS_FLOATS = (
    96  # of a step that the native library has as floats at once where nothing is padded, in memory that it keeps
)
TIMED_ROWS = (2, 4, 8, 16)  # of which a measured profile says what products reach (`DeviceProfile.few_rows_efficiency`)
# From 16 rows on every row is work: a prompt of 64 tokens beside three decoding sequences, or one of 128, must not pay for half as many again.
FEW_ROWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def padded_rows(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, then at most a quarter more than asked for beyond 64, from 512 on multiples of 128."""
    if rows > FEW_ROWS[-1]:
        return -(-rows // MANY_ROWS) * MANY_ROWS
    return FEW_ROWS[bisect_left(FEW_ROWS, rows)]
