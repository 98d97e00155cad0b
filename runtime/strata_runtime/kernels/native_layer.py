"""A decoder layer that goes as Llama's does, for some tokens, in one call of the native library; bfloat16 on processors that multiply it.

Called by `model.fused_layer`, which asks whether the library takes all of it. The library calls its own functions one after the other, those that the modules of this package call one at a time: the bits are
theirs. What a call of Python and torch takes beside a product is a third of a small model's step.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strata_runtime.kernels.native_attention import Entries, Spans
from strata_runtime.kernels.native_calls import function

MOST_TOKENS = 64  # beyond, what is saved is nothing beside the products

_STEP = struct.Struct("5q")  # the first part of `LayerCall` of kernels/native/layer.cpp, then the others
_NORMS = struct.Struct("5qd")
_PLACES = struct.Struct("12q")
_RULE = struct.Struct("d2q")


class Norms(NamedTuple):
    """Weights of a layer's norms, before and behind attention [width], of queries and keys [head_width], all with one epsilon."""

    before: Tensor | None
    behind: Tensor | None
    query: Tensor | None
    key: Tensor | None
    epsilon: float


class Seen(NamedTuple):
    """What a step's tokens see, and how: cos and sin [tokens, head_width]; where their own keys and values go, int64 [tokens]; the layer's pool; its scale and window."""

    cos: Tensor
    sin: Tensor
    places: Tensor
    entries: Entries
    spans: Spans
    page_tokens: int
    scale: float
    window: int | None


def layer(hidden: Tensor, norms: Norms, seen: Seen, products: Sequence[bytes], work_columns: int) -> Tensor:
    """hidden: [tokens, width], contiguous as all tensors here -> [tokens, width]. The tokens' keys and values are stored on the way.

    `products`: of query, key, value, output, gate, up, down, by `native_calls.product`; `work_columns`: as the function of that name says.
    """
    tokens, width = hidden.shape
    out, memory = hidden.new_empty(tokens, width), hidden.new_empty(tokens, work_columns)
    entries, spans = seen.entries, seen.spans
    weights = map(_address, norms[:4])
    numbers = (
        _STEP.pack(hidden.data_ptr(), out.data_ptr(), memory.data_ptr(), tokens, width),
        _NORMS.pack(entries.keys.shape[2], *weights, norms.epsilon),
        _PLACES.pack(
            seen.cos.data_ptr(),
            seen.sin.data_ptr(),
            seen.places.data_ptr(),
            entries.keys.data_ptr(),
            entries.values.data_ptr(),
            *map(_address, entries.scales or (None, None)),
            entries.keys.shape[1],
            seen.page_tokens,
            spans.numbers.data_ptr(),
            spans.numbers.shape[0] // 4,
            spans.pages.data_ptr(),
        ),
        _RULE.pack(seen.scale, seen.window or 0, torch.get_num_threads()),
        *products,
    )
    function("strata_layer")(b"".join(numbers))
    return out


def work_columns(width: int, queries: int, keys: int, inner: int) -> int:
    """What a token takes beside its hidden state. `inner`: outputs of the gate."""
    return 2 * width + 2 * queries + 3 * keys + 2 * inner


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
