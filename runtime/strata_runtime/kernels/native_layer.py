"""Decoder layers that go as Llama's do, one behind the other, for some tokens, in one call of the native library; bfloat16 on processors that multiply it.

Called by `model.fused_layer` and `model.fused_decoder`, which ask whether the library takes all of it. The library calls its own functions one after the
other, those that the modules of this package call one at a time: the bits are theirs. What a call of Python and torch takes beside a product is a third of a
small model's step.
"""

import ctypes
import struct
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from strata_runtime.kernels.native_attention import Entries, Spans
from strata_runtime.kernels.native_calls import PRODUCT_BYTES, counting

MOST_TOKENS = 64  # beyond, what is saved is nothing beside the products

# The parts of `LayersCall` of kernels/native/layer.cpp: of a call, of a step, of each layer before its products.
_CALL, _STEP, _LAYER = struct.Struct("11q"), struct.Struct("10q"), struct.Struct("6qd5qdq")
LAYER_BYTES = _LAYER.size + 7 * PRODUCT_BYTES
_ALONE = (0,) * 6


class Norms(NamedTuple):
    """Weights of a layer's norms, before and behind attention [width], of queries and keys [head_width]."""

    before: Tensor | None  # of every layer there is one
    behind: Tensor | None
    query: Tensor | None
    key: Tensor | None


class Step(NamedTuple):
    """What all layers of a step have in common. `memory`: [tokens, `work_columns` of the largest layer], what a layer takes beside its hidden states."""

    tokens: int
    memory: Tensor
    numbers: bytes


def step(cos: Tensor, sin: Tensor, places: Tensor, spans: Spans, page_tokens: int, work_columns: int) -> Step:
    """cos and sin: bfloat16 [tokens or more, head_width], contiguous; places: where keys and values of the tokens go, int64 [tokens].

    The bytes hold none of them.
    """
    tokens = places.shape[0]
    memory = cos.new_empty(tokens, work_columns)
    numbers = _STEP.pack(
        tokens,
        memory.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        places.data_ptr(),
        page_tokens,
        spans.numbers.data_ptr(),
        spans.numbers.shape[0] // 4,
        spans.pages.data_ptr(),
        torch.get_num_threads(),
    )
    return Step(tokens, memory, numbers)


def layer_numbers(norms: Norms, epsilon: float, entries: Entries, scale: float, window: int | None) -> bytes:
    """What a layer is beside its products: its norms, its pool, how its tokens see. The bytes hold none of it."""
    keys = entries.keys
    assert norms.before is not None, "a layer without a norm before its attention does not go as Llama's"
    return _LAYER.pack(
        norms.before.shape[0],
        keys.shape[2],
        *map(_address, norms),
        epsilon,
        keys.data_ptr(),
        entries.values.data_ptr(),
        *map(_address, entries.scales or (None, None)),
        keys.shape[1],
        scale,
        window or 0,
    )


class Meetings(Protocol):
    """Of the ranks that share layers: their sums, in the library."""

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """`Ranks` of layer.cpp."""

    def check(self, late: int) -> None:
        """Raises RankLostError for what the library says of a meeting."""


def layers(hidden: Tensor, step: Step, named: bytes, begun: ctypes.c_int64, meetings: Meetings | None = None) -> Tensor:
    """hidden: [1, tokens or more, width], contiguous -> the same, zeros behind the tokens. Their keys and values are stored on the way.

    `named`: of one layer behind the other its numbers by `layer_numbers`, and its products: of query, key, value, output, gate, up, down, by
    `native_calls.product`. `begun` grows by one with each layer that is begun, while the library is at it. `meetings`: where ranks share the layers.
    """
    out = torch.empty_like(hidden)
    if hidden.shape[1] > step.tokens:
        out[:, step.tokens :] = 0
    count, ranks = len(named) // LAYER_BYTES, _ALONE if meetings is None else meetings.numbers
    call = _CALL.pack(hidden.data_ptr(), out.data_ptr(), ctypes.addressof(begun), count, hidden.shape[1], *ranks)
    late = counting("strata_layers")(b"".join((call, step.numbers, named)))
    if meetings is not None:
        meetings.check(late)
    return out


def work_columns(width: int, queries: int, keys: int, inner: int) -> int:
    """What a token takes beside its hidden state. `inner`: outputs of the gate."""
    return 2 * width + 2 * queries + 3 * keys + 2 * inner


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
