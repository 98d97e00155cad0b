"""What this build of torch and this processor can do, found out by trying, once a process.

Called by `kernels` before it offers a kernel. A kernel is believed only if a small product comes out right: the layout that torch packs
int4 weights into depends on the processor, and int8 products of processors without VNNI saturate.
"""

from functools import cache

import torch

from strata_runtime.formats import packing

aten = torch.ops.aten
PROBE_COLUMNS = 32


@cache
def int4pack_on_cpu() -> bool:
    """torch's int4 kernel exists and reads the layout of `packing` on this processor."""
    if not hasattr(aten, "_weight_int4pack_mm_for_cpu") or not hasattr(aten, "_convert_weight_to_int4pack_for_cpu"):
        return False
    for part in packing.segments(packing.BLOCK_ROWS + packing.ROW_QUANTUM):
        codes = ((torch.arange(part.rows * PROBE_COLUMNS) * 7) % 16).view(part.rows, PROBE_COLUMNS)
        theirs = aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)  # noqa: SLF001 -- torch names its kernels so
        if not torch.equal(theirs.flatten(), packing.pack_segment(codes.to(torch.uint8), part)):
            return False
    return True


@cache
def int8pack_on_cpu() -> bool:
    return hasattr(aten, "_weight_int8pack_mm")


@cache
def int_mm_on_cpu() -> bool:
    """Products of int8 matrices are exact, at the largest values too."""
    if not hasattr(torch, "_int_mm"):
        return False
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    int_mm = torch._int_mm  # noqa: SLF001 -- torch names its kernels so
    products = (int_mm(largest, largest.t()), int_mm(largest, -largest.t()))
    return [int(product[0, 0]) for product in products] == [64 * 127 * 127, -64 * 127 * 127]


@cache
def scaled_mm(device: torch.device) -> bool:
    """Products of float8 matrices come out in float32 with nothing lost: GPUs from SM 8.9 on."""
    if not hasattr(torch, "_scaled_mm"):
        return False
    one = torch.ones((), device=device)
    largest = torch.full((16, 64), torch.finfo(torch.float8_e4m3fn).max, device=device).to(torch.float8_e4m3fn)
    try:
        sums = torch._scaled_mm(  # noqa: SLF001 -- torch names its kernels so
            largest, largest.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
        )
    except RuntimeError:
        return False
    return bool((sums == 64 * torch.finfo(torch.float8_e4m3fn).max ** 2).all())
