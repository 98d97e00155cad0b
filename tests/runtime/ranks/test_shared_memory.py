"""Collectives over shared memory: sums and gathers of ranks, and what becomes of those who wait for one that does not come."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.ranks.collectives import RankLostError
from strata_runtime.ranks.cut import share as share_of
from strata_runtime.ranks.shared_memory import BUFFER_BYTES, SharedMemory
from tests.laws import share
from tests.runtime.ranks.together import together

LARGE = BUFFER_BYTES // 2 + 5  # items: more than a buffer of either type


def items_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(7 * rank + 1)).to(dtype)


@given(
    ranks=st.integers(1, 4),
    counts=st.lists(st.one_of(st.integers(0, 3000), st.just(LARGE)), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=share(30), deadline=None)
def test_a_sum_is_that_of_all_ranks_and_the_same_bits_on_each(
    ranks: int, counts: list[int], dtype: torch.dtype
) -> None:
    def body(collectives: SharedMemory) -> list[torch.Tensor]:
        own = [items_of(collectives.rank, count, dtype) for count in counts]
        for items in own:
            collectives.all_reduce(items)
        return own

    found = together(ranks, body)
    for place, count in enumerate(counts):
        expected = sum(
            (items_of(rank, count, dtype).float() for rank in range(1, ranks)), items_of(0, count, dtype).float()
        )
        for own in found:
            assert torch.equal(own[place], expected.to(dtype))


@given(widths=st.lists(st.integers(1, 400), min_size=1, max_size=4), rows=st.sampled_from([0, 1, 3, 900]))
@settings(max_examples=share(20), deadline=None)
def test_what_ranks_have_of_some_columns_is_put_side_by_side(widths: list[int], rows: int) -> None:
    parts = [items_of(rank, rows * width, torch.float32).view(rows, width) for rank, width in enumerate(widths)]
    found = together(len(widths), lambda collectives: collectives.gather(parts[collectives.rank], tuple(widths)))
    assert all(torch.equal(each, torch.cat(parts, dim=1)) for each in found)


@given(
    ranks=st.integers(1, 4),
    width=st.integers(1, 400),
    rows=st.sampled_from([0, 1, 3, 7, 900]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=share(20), deadline=None)
def test_a_sum_in_two_halves_is_the_sum(ranks: int, width: int, rows: int, dtype: torch.dtype) -> None:
    parts = [items_of(rank, rows * width, dtype).view(rows, width) for rank in range(ranks)]

    def body(collectives: SharedMemory) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        summed = parts[collectives.rank].clone()
        collectives.all_reduce(summed)
        scattered = collectives.reduce_scatter(parts[collectives.rank])
        return summed, scattered, collectives.gather_rows(scattered, rows)

    for rank, (summed, scattered, gathered) in enumerate(together(ranks, body)):
        first, last = share_of(rows, ranks, rank)
        assert torch.equal(scattered, summed[first:last])
        assert torch.equal(gathered, summed)


def test_numbers_that_are_none_stay_none() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38], dtype=torch.bfloat16)

    def body(collectives: SharedMemory) -> torch.Tensor:
        items = odd.clone()
        collectives.all_reduce(items)
        return items

    for each in together(2, body):
        assert torch.equal(each.isnan(), odd.isnan())
        assert torch.equal(each[1:], (odd + odd)[1:])


def test_who_does_not_come_is_named() -> None:
    def body(collectives: SharedMemory) -> None:
        if collectives.rank != 1:
            collectives.all_reduce(torch.ones(3))

    with pytest.raises(RankLostError, match=r"rank 1 of 3 did not come to a collective within 0\.05 s"):
        together(3, body, patience=0.05)


def test_whoever_waits_is_let_go_when_the_ranks_are_ended() -> None:
    def body(collectives: SharedMemory, call: str) -> None:
        if collectives.rank == 0:
            collectives.end()
        items = torch.ones(1, 3)
        waits = {
            "sum": partial(collectives.all_reduce, items),
            "gather": partial(collectives.gather, items, (3, 3)),
            "scatter": partial(collectives.reduce_scatter, items),
            "rows": partial(collectives.gather_rows, items[: 1 - collectives.rank], 1),
            "meet": collectives.meet,
        }
        with pytest.raises(RankLostError, match="were ended"):
            waits[call]()

    for call in ("sum", "gather", "scatter", "rows", "meet"):
        together(2, partial(body, call=call), patience=60)
