"""Attention over paged keys and values in the native library: bfloat16 on processors that multiply it.

Called by `model.attention`, where `takes`. One pass over each sequence's blocks where they lie; nothing is gathered, masked or padded.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata_runtime.kernels import native_dense
from strata_runtime.kernels.native_calls import function

_CALL = struct.Struct("17q2d5q")  # `AttentionCall` of kernels/native/calls.h
_LANES, _WIDEST = 16, 256  # widths of a head: multiples of the one up to the other


@dataclass(frozen=True, eq=False)
class Entries:
    """A layer's keys and values [kv_heads, places, width], contiguous: bfloat16, or int8 with `scales` bfloat16 [kv_heads, places] each."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Spans:
    """What a step computes: int64 [spans, 4] (first row, start, tokens, where its pages begin in `pages`), and int64 `pages`."""

    numbers: Tensor
    pages: Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int, Sequence[int]]]) -> "Spans":
        """From (first row, start, tokens, pages of all positions) of each sequence."""
        numbers: list[int] = []
        pages: list[int] = []
        for row, start, length, held in spans:
            numbers += (row, start, length, len(pages))
            pages += held
        return cls(torch.tensor(numbers), torch.tensor(pages))


@dataclass(frozen=True, eq=False)
class Scores:
    """What becomes of scores, as `model.attention_rule` has it; `slopes`, `sinks`: float32 [heads]."""

    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None
    slopes: Tensor | None
    sinks: Tensor | None
    first: int = 0


def takes(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    return native_dense.multiplies(dtype, device) and width % _LANES == 0 and width <= _WIDEST


def attend(query: Tensor, entries: Entries, spans: Spans, page_tokens: int, scores: Scores) -> Tensor:
    """query: bfloat16 [heads, tokens, width] -> [tokens, heads, width]. The tokens' own keys and values are among `entries`."""
    if query.stride(2) != 1:
        query = query.contiguous()
    heads, tokens, width = query.shape
    kv_heads, places, _ = entries.keys.shape
    out = query.new_empty(tokens, heads, width)
    scales = (0, 0) if entries.scales is None else (entries.scales[0].data_ptr(), entries.scales[1].data_ptr())
    function("strata_attend")(
        _CALL.pack(
            query.data_ptr(),
            *query.stride()[:2],
            entries.keys.data_ptr(),
            entries.values.data_ptr(),
            *scales,
            heads,
            kv_heads,
            width,
            places,
            page_tokens,
            spans.numbers.data_ptr(),
            spans.numbers.shape[0] // 4,
            spans.pages.data_ptr(),
            0 if scores.slopes is None else scores.slopes.data_ptr(),
            0 if scores.sinks is None else scores.sinks.data_ptr(),
            scores.scale,
            scores.soft_cap or 0.0,
            scores.window or 0,
            scores.chunk or 0,
            scores.first,
            out.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return out
