"""Huge pages: which ones weights take, and that what lies there stays what it was."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from strata_runtime import huge_pages
from strata_runtime.huge_pages import gather, gather_beside, kept_by, mostly_taken, page_bytes, untouched
from strata_runtime.loading.blocked import BlockedLinear, can_block

SIZE = 16
SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)).map(lambda each: (each[0], sum(each))), max_size=12)


@given(SPANS)
def test_a_page_counts_where_weights_take_three_quarters(spans: list[tuple[int, int]]) -> None:
    taken = {address for begin, end in spans for address in range(begin, end)}
    pages = range(0, 300, SIZE)
    most = [page for page in pages if 4 * len(taken & {*range(page, page + SIZE)}) >= 3 * SIZE]
    assert mostly_taken(spans, SIZE) == most


def huge_bytes(address: int) -> int:
    """Of the mapping that the address lies in."""
    size, is_within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_within = int(head[1], 16) <= address < int(head[2], 16)
        elif is_within and line.startswith("AnonHugePages:"):
            size = int(line.split()[1]) << 10
    return size


@pytest.fixture
def large() -> torch.Tensor:
    if not page_bytes():
        pytest.skip("no huge pages here, or switched off")
    return torch.arange(6 << 20, dtype=torch.int32)  # 24 MiB: a mapping of its own


def test_what_is_gathered_stays_what_it_was(large: torch.Tensor) -> None:
    before = large.clone()
    gather([large])
    gather([large])  # what lies there already stays
    assert torch.equal(large, before)


def test_memory_that_is_told_of_before_it_is_touched(large: torch.Tensor) -> None:
    """Where the kernel gives such pages to what is gathered, it has been given them by its first touch too."""
    gather([large])
    if not huge_bytes(large.data_ptr() + large.nbytes // 2):
        pytest.skip("no huge page is free")
    made = untouched(torch.empty(8 << 20, dtype=torch.int32)).zero_()
    assert huge_bytes(made.data_ptr() + made.nbytes // 2)
    assert not made.any()


def test_nothing_is_asked_for_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    huge_pages.wait()  # for what other tests have loaded
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *_: asked.append(1) or 0)
    small = nn.Linear(8, 8)
    gather(kept_by([small]))
    gather_beside([small])
    untouched(torch.empty(64))
    untouched(torch.empty(0))
    gather([torch.empty(4 << 20, device="meta")])
    assert not asked


def test_an_older_kernel_is_asked_to_do_it_later(large: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    huge_pages.wait()
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "_collapses", lambda: False)
    monkeypatch.setattr(huge_pages, "_advise", lambda _address, _length, advice: asked.append(advice) or 0)
    gather([large])
    assert {*asked} == {14}, "MADV_HUGEPAGE alone"


def test_what_is_gathered_beside_is_waited_for(large: torch.Tensor) -> None:
    linear = nn.Linear(2048, 2048, dtype=torch.bfloat16)
    before = linear.weight.detach().clone()
    gather_beside([linear])
    huge_pages.wait()
    assert torch.equal(linear.weight, before)


def test_weights_in_layouts_of_their_own_are_kept_too() -> None:
    if not can_block(torch.bfloat16, torch.device("cpu")):
        pytest.skip("no such layout on this processor")
    linear = BlockedLinear(torch.ones(64, 64, dtype=torch.bfloat16), None)
    if linear.packed is None:
        pytest.skip("oneDNN's, whose memory it does not tell")
    assert any(each.data_ptr() == linear.packed.values.data_ptr() for each in kept_by([nn.Sequential(linear)]))
