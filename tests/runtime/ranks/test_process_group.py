"""Collectives by torch.distributed, here by Gloo between processors: sums and gathers as over shared memory, and what becomes of those who wait."""

import gc
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_runtime.ranks import kinds, process_group, shared_memory
from strata_runtime.ranks.collectives import RankLostError
from strata_runtime.ranks.process_group import ProcessGroup, make_meeting
from tests.laws import share
from tests.runtime.ranks.test_shared_memory import items_of
from tests.runtime.ranks.together import distributed

CPU = torch.device("cpu")


@given(
    ranks=st.integers(1, 4),
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=share(12), deadline=None)
def test_a_sum_is_that_of_all_ranks_and_the_same_bits_on_each(
    ranks: int, counts: list[int], dtype: torch.dtype
) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        own = [items_of(group.rank, count, dtype) for count in counts]
        for items in own:
            group.all_reduce(items)
        group.finish()
        return own

    found = distributed(ranks, body)
    for place, count in enumerate(counts):
        parts = [items_of(rank, count, dtype).double() for rank in range(ranks)]
        rounded = torch.finfo(dtype).eps * sum((part.abs() for part in parts), torch.zeros(count).double()) * ranks
        assert ((found[0][place].double() - sum(parts, torch.zeros(count).double())).abs() <= rounded).all()
        for own in found:
            assert torch.equal(own[place], found[0][place])


@given(widths=st.lists(st.integers(1, 400), min_size=1, max_size=4), rows=st.sampled_from([0, 1, 3, 90]))
@settings(max_examples=share(10), deadline=None)
def test_what_ranks_have_of_some_columns_is_put_side_by_side(widths: list[int], rows: int) -> None:
    parts = [items_of(rank, rows * width, torch.float32).view(rows, width) for rank, width in enumerate(widths)]
    found = distributed(len(widths), lambda group: group.gather(parts[group.rank], tuple(widths)))
    assert all(torch.equal(each, torch.cat(parts, dim=1)) for each in found)


def test_who_waits_for_one_that_does_not_come_is_let_go_within_the_patience() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank != 1:
            group.all_reduce(torch.ones(3))

    with pytest.raises(RankLostError, match=r"of 3: a collective failed, as another rank hangs, or died: .*"):
        distributed(3, body, patience=0.2)


def test_nothing_is_added_up_when_the_ranks_were_ended() -> None:
    def body(group: ProcessGroup) -> None:
        group.end()
        with pytest.raises(RankLostError, match="were ended"):
            group.all_reduce(torch.ones(3))

    distributed(2, body)


def test_who_joins_alone_is_let_go_at_once_when_the_ranks_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 1.0)
    file = make_meeting()
    group = ProcessGroup(file, 0, 2, CPU)
    os.close(file)
    threading.Timer(0.05, group.end).start()
    with pytest.raises(RankLostError, match="were ended"):
        group.join()


def test_who_joins_alone_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "JOIN_SECONDS", 0.2)
    file = make_meeting()
    group = ProcessGroup(file, 0, 2, CPU)
    os.close(file)
    with pytest.raises(RankLostError, match="rank 0 of 2: "):
        group.join()


def test_groups_of_one_process_know_nothing_of_each_other() -> None:
    """Of a slot that leads two stages, or of the epochs before and after."""

    def body(group: ProcessGroup) -> float:
        inner = distributed(2, lambda other: float(_summed(other, 10.0))) if group.rank == 0 else [20.0]
        assert set(inner) == {20.0}
        return float(_summed(group, 1.0))

    assert distributed(2, body) == [2.0, 2.0]


def _summed(group: ProcessGroup, value: float) -> torch.Tensor:
    items = torch.full((1,), value)
    group.all_reduce(items)
    return items


def test_a_group_that_is_gone_ends_nothing_though_its_file_was_closed_by_others() -> None:
    """torch's store opens its file once more when it goes: by then its number must be nobody else's."""
    descriptors: list[int] = []
    for _ in range(3):
        assert distributed(2, lambda group: float(_summed(group, 1.0))) == [2.0, 2.0]
        gc.collect()
        descriptors += os.pipe()
    for each in descriptors:
        os.close(each)


def test_gpus_and_machines_without_the_library_talk_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds.kind_for(CPU) == "shared"
    assert kinds.kind_for(torch.device("cuda", 1)) == "distributed"
    monkeypatch.setattr(shared_memory, "library", lambda: None)
    assert kinds.kind_for(CPU) == "distributed"
