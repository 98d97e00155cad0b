"""The rules by which steps are filled: how a prompt is cut."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.steps import chunk_of


@dataclass
class Prompt:
    length: int
    computed: int = 0

    @property
    def remaining(self) -> int:
        return self.length - self.computed


@given(
    length=st.integers(1, 100), begun=st.integers(0, 99), budget=st.integers(1, 40), page=st.sampled_from([1, 8, 16])
)
def test_a_prompt_is_cut_into_as_few_steps_as_there_must_be_and_into_equal_ones(
    length: int, begun: int, budget: int, page: int
) -> None:
    """Up to the end of its block, where others may go on: no step of those is longer than another by more than one token."""
    prompt = Prompt(length, min(begun, length - 1))
    left = min(page - prompt.computed % page, prompt.remaining)
    chunks = []
    while sum(chunks) < left:
        chunks.append(chunk_of(prompt, budget, page, to_a_block=False))
        assert 0 < chunks[-1] <= budget
        prompt.computed += chunks[-1]
    assert prompt.remaining == 0 or prompt.computed % page == 0
    if budget < left:
        assert len(chunks) == -(-left // budget)
        assert max(chunks) - min(chunks) <= 1
