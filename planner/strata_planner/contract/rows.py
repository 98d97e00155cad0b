"""How many rows a processor's products have: steps are padded to few numbers of them.

oneDNN compiles and keeps a kernel for every number of rows of every linear, 0.7 MB each: steps of ever new sizes would fill the
memory. The runtime pads by this rule, the planner counts kernels by it.
"""

MANY_ROWS = 128
FEW_ROWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def padded_rows(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12 ... 96, then multiples of 128."""
    return next((size for size in FEW_ROWS if size >= rows), -(-rows // MANY_ROWS) * MANY_ROWS)
