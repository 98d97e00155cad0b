"""The heap while a stage serves: the first step of a size leaves no holes, later ones change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_runtime import allocator
from strata_runtime.allocator import FirstTimes


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    names = {allocator._MAPPED_ALONE_BYTES: "alone", allocator._KEPT_BYTES: "kept"}
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
        ((8, 1), ["trim", "alone", "kept", "trim"]),
        ((8, 1), []),
        ((1, 8), ["trim", "alone", "kept", "trim"]),  # eight sampled rows are not eight rows
        ((8, 8), []),  # each number has been met in its place
    ):
        said.clear()
        with times.step(*sizes):
            pass
        assert said == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_there_are_at_most_as_many_first_times_as_numbers(steps: list[tuple[int, int]]) -> None:
    times = FirstTimes()
    first = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator, "freed_at_once", lambda: pytest.fail("unasked") if first > 12 else _Nothing())
        patch.setattr(allocator, "_trim", lambda: None)
        for sizes in steps:
            first += isinstance(times.step(*sizes), _Nothing)
    assert first <= sum(len({step[place] for step in steps}) for place in (0, 1))


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
