"""Steps over pages in no order, as a pool on a GPU holds them, and what plain attention over each sequence gives."""

import math
from dataclasses import dataclass, replace

import torch

from strata_runtime.kernels import paged_attention
from strata_runtime.kernels.native_attention import Entries, Scores
from strata_runtime.kernels.paged_attention import Tables

PLAIN = Scores(scale=0.125, window=None, chunk=None, soft_cap=None, slopes=None, sinks=None)


@dataclass
class PagedStep:
    """Sequences with `start` earlier positions and `length` new tokens each."""

    spans: list[tuple[int, int]]
    heads: int
    kv_heads: int
    width: int
    page_tokens: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-(start + length) // self.page_tokens) for start, length in self.spans]
        pages = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.pages = [[pages.pop() for _ in range(count)] for count in counts]
        pool = (sum(counts) + 2, self.page_tokens, self.kv_heads, self.width)
        self.keys, self.values = (torch.randn(pool, generator=generator).to(self.device, self.dtype) for _ in range(2))
        tokens = sum(length for _, length in self.spans)
        shape = (tokens, self.heads, self.width)  # as projections give them
        self.query = torch.randn(shape, generator=generator).to(self.device, self.dtype).transpose(0, 1)

    def entries(self) -> Entries:
        return Entries(self.keys, self.values)

    def tables(self) -> Tables:
        row, spans = 0, []
        for (start, length), pages in zip(self.spans, self.pages, strict=True):
            spans.append((row, start, length, pages))
            row += length
        return Tables.of(spans, self.heads // self.kv_heads, self.query.device)

    def alone(self, number: int) -> "PagedStep":
        """One of the sequences by itself, over the same pool."""
        row = sum(length for _, length in self.spans[:number])
        step = replace(self, spans=[self.spans[number]])
        step.pages, step.keys, step.values = [self.pages[number]], self.keys, self.values
        step.query = self.query[:, row : row + self.spans[number][1]]
        return step

    def places(self, number: int) -> list[int]:
        """Where the positions of a sequence lie in the pool."""
        held = [page * self.page_tokens + each for page in self.pages[number] for each in range(self.page_tokens)]
        return held[: sum(self.spans[number])]

    def spoil_all_but(self, places: list[int]) -> None:
        others = [each for each in range(self.keys.shape[0] * self.page_tokens) if each not in set(places)]
        for entries in (self.keys, self.values):
            entries.view(-1, self.kv_heads, self.width)[others] = math.nan

    def expected(self, scores: Scores) -> torch.Tensor:
        """[tokens, heads, width] float32, written out in float64; zeros for tokens that see nothing."""
        row, found = 0, []
        for number, (start, length) in enumerate(self.spans):
            places = self.places(number)
            keys, values = (
                each.view(-1, self.kv_heads, self.width)[places].transpose(0, 1) for each in (self.keys, self.values)
            )
            found.append(plain(self.query[:, row : row + length], keys, values, start, scores))
            row += length
        return torch.cat(found).float().nan_to_num()


def attended(step: PagedStep, scores: Scores, entries: Entries | None = None) -> torch.Tensor:
    return paged_attention.attend(step.query, entries or step.entries(), step.tables(), step.page_tokens, scores)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, rule: Scores) -> torch.Tensor:
    """[tokens, heads, width] in float64, written out."""
    group = len(query) // len(key)
    key, value = key.repeat_interleave(group, 0).double(), value.repeat_interleave(group, 0).double()
    scores = query.double() @ key.transpose(1, 2) * rule.scale
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    own = torch.arange(start, start + query.shape[1], device=query.device)[:, None]
    place = torch.arange(key.shape[1], device=query.device)
    if rule.slopes is not None:
        scores = scores + rule.slopes[:, None, None] * (place - own)
    seen = (place <= own) & (place >= rule.first)
    if rule.window is not None:
        seen &= place > own - rule.window
    if rule.chunk is not None:
        seen &= place >= own // rule.chunk * rule.chunk
    scores = scores.masked_fill(~seen, -math.inf)
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks[:, None, None].expand(-1, len(own), 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[1]] @ value).transpose(0, 1)
