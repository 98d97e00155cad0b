"""Which processors a device is: never across memories, each processor in as many devices' parts as it must be, and lists as the kernel writes them."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.processors import (
    ANYWHERE,
    Division,
    bind,
    bound,
    listed_processors,
    memories,
    processors_of,
    usable_processors,
)

TWO = (frozenset({0, 1}), frozenset({2, 3}))
FOUR = tuple(frozenset({number}) for number in range(4))


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3\n", {0, 1, 2, 3}), ("0,2-3,8", {0, 2, 3, 8}), ("\n", set()), ("7", {7})]
)
def test_lists_of_processors(text: str, numbers: set[int]) -> None:
    assert listed_processors(text) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "0..3", "-1"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="no list of processors"):
        listed_processors(text)


CASES = {
    "one memory": (0, 2, TWO[:1], ANYWHERE),
    "one device": (0, 1, TWO, ANYWHERE),
    "nothing is told": (0, 2, (), ANYWHERE),
    "a device each": (1, 2, TWO, TWO[1]),
    "two devices each, the second": (1, 4, TWO, TWO[0]),
    "two devices each, the third": (2, 4, TWO, TWO[1]),
    "two memories each": (1, 2, FOUR, FOUR[2] | FOUR[3]),
    "across memories": (1, 3, TWO, ANYWHERE),
    "a number beyond those that are told": (3, 2, TWO, TWO[1]),
}


@pytest.mark.parametrize("case", CASES)
def test_where_a_device_computes(case: str) -> None:
    device, devices, beside, expected = CASES[case]
    assert processors_of(device, devices, beside) == expected


@given(devices=st.integers(1, 12), count=st.integers(1, 6))
def test_devices_share_memories_evenly(devices: int, count: int) -> None:
    """All or none are bound; then each memory has as many, and nobody is at two that another has one of."""
    beside = tuple(frozenset({2 * number, 2 * number + 1}) for number in range(count))
    parts = [processors_of(number, devices, beside) for number in range(devices)]
    if ANYWHERE in parts:
        assert set(parts) == {ANYWHERE}
        return
    assert ANYWHERE.union(*parts) == ANYWHERE.union(*beside)
    used = [sum(bool(part & memory) for part in parts) for memory in beside]
    assert set(used) == {max(1, devices // count)}


def test_a_nodes_first_device_counts_on() -> None:
    assert Division(first=1, devices=2).processors(0, TWO) == TWO[1]


def test_memories_are_those_with_processors_that_may_be_used(tmp_path: Path) -> None:
    for name, cpus in {"node10": "6-7", "node0": "0-3", "node2": "4,5", "node3": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{cpus}\n")
    (tmp_path / "has_cpu").write_text("0\n")
    assert memories(tmp_path, range(8)) == (frozenset({0, 1, 2, 3}), frozenset({4, 5}), frozenset({6, 7}))
    assert memories(tmp_path, {1, 6}) == (frozenset({1}), frozenset({6}))
    assert memories(tmp_path / "none") == ()


def test_what_is_bound_runs_there_and_leaves_the_caller_where_it_was() -> None:
    before = usable_processors()
    last = frozenset({max(before)})
    assert bound(last, lambda: os.sched_getaffinity(0)) == last
    assert bound(ANYWHERE, lambda: os.sched_getaffinity(0)) == before
    with pytest.raises(ZeroDivisionError):
        bound(last, lambda: 1 // 0)
    bind(ANYWHERE)
    assert usable_processors() == before
