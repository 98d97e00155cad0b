"""Laws of the page pool: nothing is lost, nothing is owned twice, refusals change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from strata_runtime.errors import PoolExhaustedError, StepError
from strata_runtime.model.kv.pages import PageTable

SEQUENCES = st.integers(0, 4)


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations on a pool of 12 pages of 4 tokens, beside a model that knows only lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(pages=12, page_tokens=4)
        self.lengths: dict[int, int] = {}

    @rule(sequence=SEQUENCES, back=st.integers(0, 3) | st.integers(0, 48), count=st.integers(1, 20))
    def extend(self, sequence: int, back: int, count: int) -> None:
        written = self.lengths.get(sequence, 0)
        start = max(0, written - back)
        fits = -(-(start + count) // 4) - -(-written // 4) <= self.table.free_pages
        if fits:
            self.table.extend(sequence, start, count)
            self.lengths[sequence] = start + count
        else:
            with pytest.raises(PoolExhaustedError, match=f"sequence {sequence} needs .* of this slot's 12"):
                self.table.extend(sequence, start, count)

    @rule(sequence=SEQUENCES)
    def free(self, sequence: int) -> None:
        self.table.free(sequence)
        self.lengths.pop(sequence, None)

    @invariant()
    def every_page_is_free_or_owned_once(self) -> None:
        self.table.integrity()
        assert {sequence: self.table.length(sequence) for sequence in self.lengths} == self.lengths


TestPool = PoolMachine.TestCase


@given(start=st.integers(1, 50), length=st.integers(-2, 5))
def test_a_gap_is_refused(start: int, length: int) -> None:
    table = PageTable(pages=8, page_tokens=4)
    with pytest.raises(StepError, match=f"tokens at position {start}, but 0 positions are written"):
        table.extend(7, start, length)
    table.integrity()
