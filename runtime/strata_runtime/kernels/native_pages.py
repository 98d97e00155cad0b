"""Keys and values at 8 bits in the native library (`kernels/native/kv_pages.cpp`): rounded into their places, gathered and restored, each in one pass.

Called by the pool where `takes` says so. The bits are those of `rounding`, which is the way without a library and on GPUs.
"""

import struct

import torch
from torch import Tensor

from strata_runtime.kernels import native
from strata_runtime.kernels.native_calls import function

TYPE_NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # `Type` of kernels/native/planes.h
_PAGES_CALL = struct.Struct("11q")
_ENTRIES_CALL = struct.Struct("12q")


def takes(device: torch.device) -> bool:
    return device.type == "cpu" and native.library() is not None


def store(entries: Tensor, places: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """entries [heads, tokens, width] to `places` int64 [tokens] of codes int8 [heads, held, width] and scales bfloat16 [heads, held], contiguous.

    Returns the entries as they are restored, contiguous.
    """
    heads, tokens, width = entries.shape
    if entries.stride(2) != 1:
        entries = entries.contiguous()
    out = entries.new_empty(heads, tokens, width)
    given = (entries.data_ptr(), entries.stride(0), entries.stride(1), TYPE_NUMBERS[entries.dtype])
    held = (codes.data_ptr(), scales.data_ptr(), codes.shape[1])
    function("strata_round_entries")(
        _ENTRIES_CALL.pack(*given, heads, tokens, width, places.data_ptr(), *held, out.data_ptr())
    )
    return out


def gather(codes: Tensor, scales: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """codes int8 [2, heads, pages, page_tokens, width] and scales bfloat16 [2, heads, pages, page_tokens], both contiguous; pages: int64 [P].

    Returns [2, heads, P * page_tokens, width] in `dtype`.
    """
    two, heads, count, page_tokens, width = codes.shape
    chosen = pages.shape[0]
    out = torch.empty(two, heads, chosen * page_tokens, width, dtype=dtype)
    held = (codes.data_ptr(), scales.data_ptr(), two * heads, count, page_tokens, width)
    wanted = (pages.data_ptr(), chosen, out.data_ptr(), TYPE_NUMBERS[dtype])
    function("strata_restore_pages")(_PAGES_CALL.pack(*held, *wanted, torch.get_num_threads()))
    return out
