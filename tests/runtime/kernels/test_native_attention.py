"""Attention over pages in the native library: plain attention over each sequence, whatever lies beside it in a step."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime.kernels import native_attention
from strata_runtime.kernels.native_attention import Entries, Scores, Spans, attend
from strata_runtime.model.kv.rounding import restore, round_entries
from tests.runtime.kernels.levels import EACH_LEVEL, laws
from tests.runtime.kernels.paged_steps import PLAIN, plain

CPU = torch.device("cpu")
pytestmark = EACH_LEVEL


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass
class Step:
    """Sequences with `start` earlier positions and `length` new tokens, their pages in no order."""

    spans: list[tuple[int, int]]
    heads: int
    kv_heads: int
    width: int
    page_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        counts = [-(-(start + length) // self.page_tokens) for start, length in self.spans]
        pages = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.pages = [[pages.pop() for _ in range(count)] for count in counts]
        places = (sum(counts) + 2) * self.page_tokens
        self.keys = drawn(self.seed + 1, self.kv_heads, places, self.width)
        self.values = drawn(self.seed + 2, self.kv_heads, places, self.width)
        self.query = drawn(self.seed + 3, self.heads, sum(length for _, length in self.spans), self.width)

    def numbers(self) -> Spans:
        row, spans = 0, []
        for (start, length), pages in zip(self.spans, self.pages, strict=True):
            spans.append((row, start, length, pages))
            row += length
        return Spans.of(spans)

    def places(self, sequence: int) -> torch.Tensor:
        held = [page * self.page_tokens + each for page in self.pages[sequence] for each in range(self.page_tokens)]
        return torch.tensor(held[: sum(self.spans[sequence])])

    def attended(self, scores: Scores, entries: Entries | None = None) -> torch.Tensor:
        return attend(self.query, entries or Entries(self.keys, self.values), self.numbers(), self.page_tokens, scores)

    def expected(self, scores: Scores, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        row, found = 0, []
        for number, (start, length) in enumerate(self.spans):
            held = self.places(number)
            found.append(plain(self.query[:, row : row + length], keys[:, held], values[:, held], start, scores))
            row += length
        return torch.cat(found)


rules = st.one_of(
    st.just({}),
    st.builds(lambda window: {"window": window}, st.sampled_from([1, 5, 64, 200])),
    st.builds(lambda chunk: {"chunk": chunk}, st.sampled_from([4, 64, 128])),
)
steps = st.builds(
    lambda spans, kv_heads, group, width, page, seed: Step(spans, kv_heads * group, kv_heads, width, page, seed),
    st.lists(
        st.tuples(st.sampled_from([0, 3, 17, 130, 300]), st.sampled_from([1, 1, 2, 5, 16, 49, 140])),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([16, 32, 64, 80, 96, 128, 208, 256]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 99),
)


@laws(60)
@given(steps, rules, st.sampled_from([None, 5.0]), st.sampled_from(["", "slopes", "sinks"]))
def test_it_is_plain_attention_over_each_sequence(
    step: Step, reach: dict[str, int], soft_cap: float | None, term: str
) -> None:
    terms = {term: torch.linspace(-0.5, 0.5, step.heads)} if term else {}
    scores = replace(PLAIN, scale=step.width**-0.5, soft_cap=soft_cap, **reach, **terms)  # type: ignore[arg-type]
    found = step.attended(scores).double()
    assert (found - step.expected(scores, step.keys, step.values)).abs().max() < 0.03


@laws(20)
@given(steps)
def test_entries_of_8_bits_are_what_the_pool_restores(step: Step) -> None:
    stored = [round_entries(each) for each in (step.keys, step.values)]
    entries = Entries(stored[0][0], stored[1][0], (stored[0][1], stored[1][1]))
    keys, values = (restore(codes, scales, torch.bfloat16) for codes, scales in stored)
    assert torch.equal(step.attended(PLAIN, entries), step.attended(PLAIN, Entries(keys, values)))


@laws(30)
@given(steps, rules, st.data())
def test_what_a_token_gets_does_not_depend_on_those_beside_it(
    step: Step, reach: dict[str, int], data: st.DataObject
) -> None:
    scores = replace(PLAIN, **reach)  # type: ignore[arg-type]
    whole = step.attended(scores)
    number = data.draw(st.integers(0, len(step.spans) - 1))
    start, length = step.spans[number]
    row = sum(length for _, length in step.spans[:number])
    first = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(first + 1, length))
    alone = attend(
        step.query[:, row + first : row + stop],
        Entries(step.keys, step.values),
        Spans.of([(0, start + first, stop - first, step.pages[number])]),
        step.page_tokens,
        scores,
    )
    assert torch.equal(alone, whole[row + first : row + stop])


def test_a_value_that_is_not_finite_reaches_those_that_see_it() -> None:
    step = Step([(20, 4), (0, 3)], 4, 2, 64, 16)
    step.values[:, step.places(0)[5]] = torch.inf
    step.keys[:, step.places(1)[0]] = torch.nan
    found = step.attended(PLAIN)
    assert not found[:4].isfinite().any()
    assert found[4:].isnan().all()


def test_threads_change_nothing() -> None:
    step = Step([(130, 49), (0, 7), (300, 1)], 8, 2, 64, 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = step.attended(PLAIN)
        torch.set_num_threads(2)
        assert torch.equal(step.attended(PLAIN), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [8, 72, 288])
def test_widths_that_no_vector_fits_are_left_to_torch(width: int) -> None:
    assert not native_attention.takes(torch.bfloat16, CPU, width)
    assert all(native_attention.takes(torch.bfloat16, CPU, each) for each in (16, 64, 80))


@laws(20)
@given(steps, rules, st.integers(1, 40))
def test_nothing_before_the_first_position_is_seen(step: Step, reach: dict[str, int], first: int) -> None:
    """Other entries there change nothing for those behind it; those that see the same without it get the same."""
    scores = replace(PLAIN, first=first, **reach)  # type: ignore[arg-type]
    found, everywhere = step.attended(scores), step.attended(replace(scores, first=0))
    before = torch.cat([step.places(number)[:first] for number in range(len(step.spans))])
    step.keys[:, before], step.values[:, before] = 3.0, 5.0
    rows = [position for start, length in step.spans for position in range(start, start + length)]
    behind = [row for row, position in enumerate(rows) if position >= first]
    assert torch.equal(step.attended(scores)[behind], found[behind])
    if (window := reach.get("window")) is not None:
        alike = [row for row in behind if rows[row] + 1 - window >= first]
        assert torch.equal(everywhere[alike], found[alike])
