"""One step's tokens, packed: which sequences, which positions, which pages, and what attention needs of them.

Made by PagedKvCache.plan once per step, read by every layer. The parts of the attention (which rows go together, which
pages they gather, what is masked) are the same for all layers with the same window, so they are made once per window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from strata_runtime.kernels.native_attention import Spans
from strata_runtime.kernels.native_layer import Step
from strata_runtime.kernels.paged_attention import Tables
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.model.kv.states import LayerState, StateRun

DECODE_GROUP_BYTES = 16 << 20  # of keys and values gathered at once: stays in cache and bounds the temporaries
_GROUP_PADDING = 0.75  # sequences at least this long, relative to the longest, share a padded batch
_SHORT_PAGES = 8  # up to here the call costs more than the padding


@dataclass(frozen=True, slots=True)
class Span:
    """`length` consecutive tokens of one sequence at positions `start`.., in rows `row`.. of the packed batch.

    `pages` hold all its positions up to start + length.
    """

    row: int
    start: int
    length: int
    pages: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.length


class Reach(NamedTuple):
    """How far back a token sees: `window` positions with its own, to the begin of its own `chunk` of positions, or all; none before `first`."""

    window: int | None = None
    chunk: int | None = None
    first: int = 0

    def first_seen(self, position: int) -> int:
        """By the token at `position`."""
        if self.chunk is not None:
            return max(self.first, position // self.chunk * self.chunk)
        return self.first if self.window is None else max(self.first, position + 1 - self.window)

    def first_seen_by_each(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The same of many; None: all see from the begin."""
        if self.chunk is not None:
            return (positions // self.chunk * self.chunk).clamp(min=self.first)
        if self.window is not None:
            return (positions + 1 - self.window).clamp(min=self.first)
        return torch.full_like(positions, self.first) if self.first else None


ALL = Reach()


@dataclass(frozen=True, slots=True)
class DecodePart:
    """One new token of each of B sequences, answered by one padded attention over gathered pages.

    rows: [B] rows of the packed batch, or None when the part is the whole batch in order. pages: [B * P], sequence after
    sequence; mask: [B, 1, 1, P * page_tokens], True where a key is seen, or None when `keys` slices off the padding.
    """

    count: int
    rows: torch.Tensor | None
    pages: torch.Tensor
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Several new tokens of one sequence.

    rows: where they lie in the batch. pages: [P] with earlier positions, or None when the keys are the chunk's own.
    mask: [tokens, keys], True where a key is seen; None: plainly causal.
    """

    rows: slice
    pages: torch.Tensor | None
    keys: slice
    mask: torch.Tensor | None


Part = DecodePart | ChunkPart


@dataclass(frozen=True)
class Batch:
    """A planned step. positions, places: [tokens] int64; places is where each token's keys and values go in the pool.

    sample_rows: [rows] int64, rows of the batch whose logits are wanted. layers: the pool of each layer with keys and values, by its number in the
    whole model; states: likewise of each layer that keeps state instead, which rows pass as `state_runs` say.
    """

    positions: torch.Tensor
    places: torch.Tensor
    sample_rows: torch.Tensor
    spans: tuple[Span, ...]
    page_tokens: int
    layers: Mapping[int, LayerPool]
    states: Mapping[int, LayerState] = field(default_factory=dict)
    state_runs: tuple[StateRun, ...] = ()
    # What whole layers in one native call have in common, by the positions and the head's width that it was worked out for: `model.fused_layer`.
    fused_steps: dict[tuple[int, int], tuple[object, Step | None]] = field(default_factory=dict, init=False)
    _parts: dict[Reach, list[Part]] = field(default_factory=dict)
    _tables: dict[int, Tables] = field(default_factory=dict)  # by how many heads share a key head

    @property
    def tokens(self) -> int:
        return int(self.positions.shape[0])

    @cached_property
    def native_spans(self) -> Spans:
        """The same for the native library, which needs no parts."""
        return Spans.of([(span.row, span.start, span.length, span.pages) for span in self.spans])

    def tables(self, group: int) -> Tables:
        """The same for GPU kernels. `group`: heads that share a key head."""
        if group not in self._tables:
            spans = [(span.row, span.start, span.length, span.pages) for span in self.spans]
            self._tables[group] = Tables.of(spans, group, self.positions.device)
        return self._tables[group]

    def parts(self, reach: Reach = ALL) -> list[Part]:
        """How attention is computed in layers whose tokens see so far back."""
        if all(reach.first_seen(span.end - 1) == 0 for span in self.spans):
            reach = ALL
        if reach not in self._parts:
            self._parts[reach] = self._plan_parts(reach)
        return self._parts[reach]

    def _plan_parts(self, reach: Reach) -> list[Part]:
        decoding = [span for span in self.spans if span.length == 1]
        parts: list[Part] = [self._decode_part(group, reach) for group in self._groups(decoding)]
        parts += [self._chunk_part(span, reach) for span in self.spans if span.length > 1]
        return parts

    def _groups(self, spans: Sequence[Span]) -> list[list[Span]]:
        """Sequences of similar length together, each group within DECODE_GROUP_BYTES; batch order kept if all fit."""
        if not spans:
            return []
        most_pages = max(1, DECODE_GROUP_BYTES // next(iter(self.layers.values())).shape.gathered_page_bytes)
        longest = max(len(span.pages) for span in spans)
        even = longest <= _SHORT_PAGES or min(len(span.pages) for span in spans) >= _GROUP_PADDING * longest
        if even and longest * len(spans) <= most_pages:
            return [list(spans)]
        groups: list[list[Span]] = []
        for span in sorted(spans, key=lambda span: -len(span.pages)):
            widest = len(groups[-1][0].pages) if groups else 0
            similar = widest <= _SHORT_PAGES or len(span.pages) >= _GROUP_PADDING * widest
            if groups and similar and widest * (len(groups[-1]) + 1) <= most_pages:
                groups[-1].append(span)
            else:
                groups.append([span])
        return groups

    def _decode_part(self, group: list[Span], reach: Reach) -> DecodePart:
        device = self.positions.device
        firsts = [reach.first_seen(span.start) // self.page_tokens for span in group]
        listed = [span.pages[first:] for span, first in zip(group, firsts, strict=True)]
        most = max(len(pages) for pages in listed)
        padded = [page for pages in listed for page in (*pages, *(pages[-1:] * (most - len(pages))))]
        begins = [
            reach.first_seen(span.start) - first * self.page_tokens for span, first in zip(group, firsts, strict=True)
        ]
        ends = [span.end - first * self.page_tokens for span, first in zip(group, firsts, strict=True)]
        alike = len(set(begins)) == len(set(ends)) == 1
        rows = [span.row for span in group]
        return DecodePart(
            count=len(group),
            rows=None if rows == list(range(self.tokens)) else torch.tensor(rows, device=device),
            pages=torch.tensor(padded, device=device),
            keys=slice(begins[0], ends[0]) if alike else slice(0, most * self.page_tokens),
            mask=None if alike else _between(begins, ends, most * self.page_tokens, device),
        )

    def _chunk_part(self, span: Span, reach: Reach) -> ChunkPart:
        device = self.positions.device
        rows = slice(span.row, span.row + span.length)
        inside = reach.first_seen(span.end - 1) == 0
        if span.start == 0:
            mask = None if inside else _causal(span, 0, reach, device)
            return ChunkPart(rows, None, slice(0, span.length), mask)
        first = reach.first_seen(span.start) // self.page_tokens
        begin = first * self.page_tokens
        return ChunkPart(
            rows=rows,
            pages=torch.tensor(span.pages[first:], device=device),
            keys=slice(0, span.end - begin),
            mask=_causal(span, begin, reach, device),
        )


def _between(begins: list[int], ends: list[int], keys: int, device: torch.device) -> torch.Tensor:
    """[B, 1, 1, keys]: True from begin to before end."""
    position = torch.arange(keys, device=device)
    begin, end = (torch.tensor(values, device=device)[:, None] for values in (begins, ends))
    return ((position >= begin) & (position < end))[:, None, None]


def _causal(span: Span, begin: int, reach: Reach, device: torch.device) -> torch.Tensor:
    """[tokens, keys] with keys at positions begin..end-1: True for a key at or before the token and in its reach."""
    query = torch.arange(span.start, span.end, device=device)[:, None]
    key = torch.arange(begin, span.end, device=device)
    seen = key <= query
    first = reach.first_seen_by_each(query)
    return seen if first is None else seen & (key >= first)
