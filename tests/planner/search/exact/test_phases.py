"""What prompts add to a step, of layers that take unlike seconds for few tokens and for many."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.costs.source import Phase
from strata_planner.question.workload import Workload
from strata_planner.search.exact.phases import Pair, SteadyPhases

sizes = st.tuples(st.integers(1, 600), st.integers(1, 80), st.integers(1, 32), st.integers(1, 512))


def begun(
    of_rows: Callable[[int], float], prompt: int, answer: int, decode: int, chunk: int
) -> tuple[float, float, int]:
    """Where it begins, what a whole chunk adds, and its tokens; `of_rows`: a layer's seconds."""
    phases, pair = SteadyPhases(Workload(prompt, answer, decode)), Pair(1, decode, chunk)

    def layer(phase: Phase) -> float:
        return of_rows(phase.total_tokens)

    rows = phases.prompts(pair).rows
    return phases.begun(layer, pair), of_rows(decode + rows) - of_rows(decode), rows


@given(sizes)
def test_nothing_begins_where_all_tokens_are_as_dear_or_the_first_are_cheap(size: tuple[int, int, int, int]) -> None:
    for each in (lambda rows: 3.0 + 0.5 * rows, lambda rows: max(40.0, 0.5 * rows)):
        found, whole, _ = begun(each, *size)
        assert found == pytest.approx(0.0, abs=1e-9 * max(1.0, whole))


@given(sizes)
def test_a_small_part_of_a_chunk_is_told_where_few_tokens_are_dear(size: tuple[int, int, int, int]) -> None:
    """By the line that begins there and ends at the whole chunk; what begins is no more than the whole."""

    def layer(rows: int) -> float:
        return float(rows**0.5)

    found, whole, rows = begun(layer, *size)
    assert 0 <= found <= whole
    few = -(-rows // 8)
    if few < rows:
        adds = layer(size[2] + few) - layer(size[2])
        assert found + few / rows * (whole - found) == pytest.approx(adds)
