"""The heap while a stage serves: the first step of a size leaves no holes, later ones change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime import allocator
from strata_runtime.allocator import FirstTimes


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    names = {allocator._KERNELS_ALONE_BYTES: "alone", allocator._KEPT_BYTES: "kept"}
    monkeypatch.setattr(
        allocator,
        "_mallopt",
        lambda parameter, value: found.append(names[value]) if parameter == allocator._MMAP_THRESHOLD else None,
    )
    monkeypatch.setattr(allocator, "_trim", lambda: found.append("trim"))
    return found


def test_only_the_first_step_of_a_size_has_its_blocks_mapped_alone(said: list[str]) -> None:
    times = FirstTimes()
    for sizes, expected in (
        ({"rows 8", "sampled 1"}, ["trim", "alone", "kept", "trim"]),
        ({"rows 8", "sampled 1"}, []),
        ({"rows 1", "sampled 8"}, ["trim", "alone", "kept", "trim"]),
        ({"rows 8", "sampled 8"}, []),  # each has been met
    ):
        said.clear()
        with times.step(sizes):
            pass
        assert said == expected


@given(st.lists(st.sets(st.integers(0, 9)), max_size=30))
def test_there_are_at_most_as_many_first_times_as_sizes(steps: list[set[int]]) -> None:
    times = FirstTimes()
    first = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator, "freed_at_once", lambda _bytes: pytest.fail("unasked") if first > 10 else _Nothing())
        patch.setattr(allocator, "_trim", lambda: None)
        for sizes in steps:
            first += isinstance(times.step(sizes), _Nothing)
    assert first <= len(set().union(*steps))


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
