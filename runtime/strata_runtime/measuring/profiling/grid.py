"""The grid: which micro-batches are measured, and in which formats by default. Pure: sizes in, a list of works out.

Called by `survey`. Row numbers lie on either side of where kernels change; each is met with several contexts, so that what depends
on rows and what depends on keys can be told apart. Batches of 3, 5 and 7 and contexts of 384 and 768 are left for validation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from strata_planner.contract.formats import DEFAULT_FORMAT_OF_BITS, FormatName
from strata_planner.contract.frames import Segment
from strata_planner.contract.latencies import PhaseName

FORMATS: tuple[FormatName, ...] = tuple(DEFAULT_FORMAT_OF_BITS.values())  # where nobody says which
DECODE_SEQUENCES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DECODE_PASTS = (32, 256, 1024, 2048)
PREFILL_TOKENS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512, 768, 1024, 1536, 2048)
PREFILL_SEQUENCES = (1, 2, 4, 16)
# New, past.
CONTINUED = (
    (64, 512),
    (128, 512),
    (128, 1536),
    (256, 256),
    (256, 1024),
    (512, 512),
    (512, 1536),
    (1024, 1024),
    (2048, 2048),
)


@dataclass(frozen=True, order=True)
class Work:
    """A micro-batch: `sequences` with `tokens` new tokens each, of which sequence number i has `past` + i cached when decoding.

    Lengths differ by one as those of a continuous batch do: equal ones would take attention's path without a mask.
    """

    phase: PhaseName
    sequences: int
    tokens: int
    past: int

    @property
    def total_tokens(self) -> int:
        return self.sequences * self.tokens

    @property
    def longest(self) -> int:
        return self.past + self.tokens + self.sequences * (self.phase == "decode")

    @property
    def cached_tokens(self) -> int:
        return self.sequences * self.longest

    def segments(self, sample: int = 0) -> list[Segment]:
        staggered = self.phase == "decode"
        return [
            Segment(number, self.past + number * staggered, self.tokens, sample) for number in range(self.sequences)
        ]


@dataclass(frozen=True)
class Limits:
    """What bounds the grid: the model's positions, the tokens that the cache holds, and a shorter grid for a first look."""

    positions: int
    cached_tokens: int
    quick: bool = False

    def allow(self, work: Work) -> bool:
        return work.longest <= self.positions and work.cached_tokens <= self.cached_tokens


def grid(limits: Limits) -> list[Work]:
    """Every work within the limits, cheap ones first."""
    works = {work for work in (*_decode(), *_prefill(), *_continued()) if limits.allow(work)}
    if limits.quick:
        works = {work for work in works if work.total_tokens <= 512 and work.past <= 1024}
    return sorted(works, key=cost_order)


def cost_order(work: Work) -> tuple[str, int, int, int]:
    """Cheap ones first, within a phase."""
    return work.phase, work.total_tokens, work.past, work.sequences


def _decode() -> Iterator[Work]:
    for sequences in DECODE_SEQUENCES:
        for past in DECODE_PASTS:
            yield Work("decode", sequences, 1, past)


def _prefill() -> Iterator[Work]:
    for total in PREFILL_TOKENS:
        for sequences in PREFILL_SEQUENCES:
            if total // sequences > 1:
                yield Work("prefill", sequences, total // sequences, 0)


def _continued() -> Iterator[Work]:
    for tokens, past in CONTINUED:
        yield Work("prefill", 1, tokens, past)
