"""Attention over paged keys and values on an NVIDIA GPU: one pass over each sequence's pages where they lie; nothing is gathered.

Called by `model.attention`, where `takes`; launches `triton_attention`. Importing this module does not import Triton: machines without it
gather pages for torch's own attention. The same law as `native_attention` on processors, for any compute type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata_runtime.kernels.native_attention import Entries, Scores
from strata_runtime.kernels.triton_device import current, is_usable

PART = 512  # keys of one program of a token that decodes
PARTS_BYTES = 16 << 20  # of what parts leave at once: as much as is gathered where no kernel runs
WIDEST, WIDEST_IN_FLOAT32 = 256, 128  # of a head: what fits in 96 KiB of shared memory
_TILE_ROWS = 64  # tokens times heads of a group in one program
_FEWEST_ROWS = 16  # of a product in the tensor cores
_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4, "num_stages": 2}  # the same roundings in one part and in several


@dataclass(frozen=True, eq=False)
class Tables:
    """A step as the kernels take it, on the device. pages: int32 [sequences, P], each sequence's table from position 0 on, padded by any page.

    decoding, chunks: int32 [tiles, 4]: first row in the batch, its position, how many tokens, which table. A token that decodes is a tile of its own.
    """

    pages: Tensor
    decoding: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int, Sequence[int]]], group: int, device: torch.device) -> "Tables":
        """From (first row, start, tokens, pages of all positions) of each sequence. `group`: heads that share a key head."""
        most = max(len(pages) for *_, pages in spans)
        pages = [page for *_, held in spans for page in (*held, *([0] * (most - len(held))))]
        decoding = [(row, start, 1, number) for number, (row, start, length, _) in enumerate(spans) if length == 1]
        chunks = [
            (row + done, start + done, min(tile_tokens(group), length - done), number)
            for number, (row, start, length, _) in enumerate(spans)
            if length > 1
            for done in range(0, length, tile_tokens(group))
        ]
        numbers = [number for tile in (*decoding, *chunks) for number in tile]
        whole = torch.tensor([*pages, *numbers], dtype=torch.int32).to(device)  # one transfer
        tiles = whole[len(pages) :].view(-1, 4)
        return cls(whole[: len(pages)].view(len(spans), most), tiles[: len(decoding)], tiles[len(decoding) :])


def tile_tokens(group: int) -> int:
    """Tokens of one sequence in one program."""
    return max(1, _TILE_ROWS // group)


def takes(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    widest = WIDEST_IN_FLOAT32 if dtype is torch.float32 else WIDEST
    return device.type == "cuda" and width <= widest and dtype in _TYPES and is_usable(device)


def attend(query: Tensor, entries: Entries, tables: Tables, page_tokens: int, scores: Scores) -> Tensor:
    """query: [heads, tokens, width] -> [tokens, heads, width]. The tokens' own keys and values are among `entries`, whose tensors lie as
    [pages, page_tokens, kv_heads, width], their scales as [pages, page_tokens, kv_heads].
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    heads, tokens, width = query.shape
    out = query.new_empty(tokens, heads, width)
    step = _Step(query, entries, tables.pages, page_tokens, scores, out)
    with current(query.device):
        if len(tables.chunks):
            _launch(step, tables.chunks, tile_tokens(heads // entries.keys.shape[2]), (1, out, out), part=0)
        if len(tables.decoding):
            _decode(step, tables.decoding)
    return out


@dataclass(frozen=True, eq=False)
class _Step:
    """What `attend` was given, and where its answer goes."""

    query: Tensor
    entries: Entries
    pages: Tensor
    page_tokens: int
    scores: Scores
    out: Tensor

    @property
    def terms(self) -> Tensor:
        """Of each head; where there are none any address, which is not read."""
        own = self.scores.slopes if self.scores.slopes is not None else self.scores.sinks
        return self.query if own is None else own

    @property
    def columns(self) -> int:
        return max(_FEWEST_ROWS, 1 << (self.query.shape[2] - 1).bit_length())


def _decode(step: _Step, tiles: Tensor) -> None:
    """Keys beyond one part are several programs': some tokens at a time, or what they leave would outgrow everything else a step holds."""
    parts = -(-step.pages.shape[1] * step.page_tokens // PART)
    if parts == 1:
        _launch(step, tiles, 1, (1, step.out, step.out), part=0)
        return
    heads, _, width = step.query.shape
    at_once = max(1, PARTS_BYTES // (heads * parts * (width + 2) * 4))
    for first in range(0, len(tiles), at_once):
        some = tiles[first : first + at_once]
        totals, sums = (
            torch.empty(len(some), heads, parts, size, dtype=torch.float32, device=some.device) for size in (width, 2)
        )
        _launch(step, some, 1, (parts, totals, sums), part=PART)
        _kernels().add_parts[len(some), heads](
            totals,
            sums,
            some,
            step.terms,
            step.out,
            parts,
            HEADS=heads,
            WIDTH=width,
            COLUMNS=step.columns,
            SINKS=step.scores.sinks is not None,
            PART=PART,
            **_OPTIONS,
        )


def _launch(step: _Step, tiles: Tensor, tokens: int, goal: tuple[int, Tensor, Tensor], part: int) -> None:
    """`tokens`: of a tile at most. goal: number of parts, `out` and `sums` of `attend_tiles`."""
    parts, out, sums = goal
    query, entries, scores = step.query, step.entries, step.scores
    kv_heads = entries.keys.shape[2]
    group = query.shape[0] // kv_heads
    in_float32 = query.dtype is torch.float32
    _kernels().attend_tiles[len(tiles), kv_heads, parts](
        query,
        query.stride(0),
        query.stride(1),
        entries.keys,
        entries.values,
        *(entries.scales or (query, query)),
        step.pages,
        step.pages.stride(0),
        tiles,
        step.terms,
        scores.scale,
        out,
        sums,
        KV_HEADS=kv_heads,
        GROUP=group,
        WIDTH=query.shape[2],
        PAGE=step.page_tokens,
        WINDOW=scores.window or 0,
        CHUNK=scores.chunk or 0,
        FIRST=scores.first,
        CAP=scores.soft_cap or 0.0,
        SLOPES=scores.slopes is not None,
        SINKS=scores.sinks is not None,
        ROUNDED=entries.scales is not None,
        PART=part,
        ROWS=max(_FEWEST_ROWS, 1 << (tokens * group - 1).bit_length()),
        COLUMNS=step.columns,
        KEYS=32 if in_float32 or step.columns > WIDEST_IN_FLOAT32 else 64,
        EXACT=in_float32,
        **_OPTIONS,
    )


_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def _kernels() -> Any:
    from strata_runtime.kernels import triton_attention  # noqa: PLC0415 -- Triton is not on every machine

    return triton_attention
