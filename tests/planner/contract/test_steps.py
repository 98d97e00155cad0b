"""The rules by which steps are filled: how a prompt is cut."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata_planner.contract.steps import KEEPS_UP, Pace, chunk_of, fewest_tokens, filled


@dataclass
class Prompt:
    length: int
    computed: int = 0

    @property
    def remaining(self) -> int:
        return self.length - self.computed


@example(
    length=50, begun=32, budget=10, page=16, is_alone=False
)  # the second takes what is left of the prompt, behind the block
@given(
    length=st.integers(1, 100),
    begun=st.integers(0, 99),
    budget=st.integers(1, 40),
    page=st.sampled_from([1, 8, 16]),
    is_alone=st.booleans(),
)
def test_the_first_in_rank_is_cut_into_as_few_steps_as_there_must_be_and_into_equal_ones(
    length: int,
    begun: int,
    budget: int,
    page: int,
    is_alone: bool,  # noqa: FBT001  a case that is drawn
) -> None:
    """To its end where it is alone, else to that of its block: of those steps none is longer by more than one token."""
    prompt = Prompt(length, min(begun, length - 1))
    left = prompt.remaining if is_alone else min(page - prompt.computed % page, prompt.remaining)
    chunks = []
    while sum(chunks) < left:
        chunks.append(chunk_of(prompt, budget, page, is_oldest=True, is_alone=is_alone))
        assert 0 < chunks[-1] <= budget
        prompt.computed += chunks[-1]
    assert is_alone or prompt.remaining == 0 or prompt.computed % page == 0
    chunks[-1] -= sum(chunks) - left  # what ends the prompt with it lies behind the block
    if budget < left:
        assert len(chunks) == -(-left // budget)
        assert max(chunks) - min(chunks) <= 1


@given(
    length=st.integers(1, 100), begun=st.integers(0, 99), budget=st.integers(0, 40), page=st.sampled_from([1, 8, 16])
)
def test_others_go_to_the_end_of_a_block_or_not_at_all(length: int, begun: int, budget: int, page: int) -> None:
    prompt = Prompt(length, min(begun, length - 1))
    most = prompt.computed + budget
    chunk = chunk_of(prompt, budget, page, is_oldest=False, is_alone=False)
    prompt.computed += chunk
    assert prompt.computed <= most
    assert chunk == 0 or prompt.remaining == 0 or prompt.computed % page == 0
    assert prompt.remaining == 0 or most < min(length, prompt.computed - prompt.computed % page + page), "another fits"


@given(
    fixed=st.floats(1e-3, 1.0),
    share=st.floats(0.02, 0.1),
    order=st.lists(st.sampled_from([*[(0, 8)] * 6, (1, 48), (0, 128), (1, 128)]), min_size=8, max_size=24),
)
def test_the_pace_is_that_of_steps_however_few_tokens_go_alone(
    fixed: float, share: float, order: list[tuple[int, int]]
) -> None:
    """Every step reads the weights: few tokens of a prompt without a row are not taken for long ones, nor a row beside many for a short one."""
    pace = Pace()
    for each in [(1, 0), *order * 8]:
        for rows, tokens in (each, (1, 0)):  # streams go on between
            pace.learn(rows, tokens, fixed * (1 + share * tokens))
    assert pace.decoding(1) == pytest.approx(fixed, rel=0.15)
    if any(tokens > 8 for _, tokens in order):
        assert pace.tokens(1, 1) >= 0.4 / share


@given(token=st.floats(0.02, 0.1), key=st.floats(0.5, 1.5), length=st.integers(2000, 8000))
@example(token=0.07, key=1.2, length=4000)
def test_streams_keep_their_pace_to_the_end_of_a_long_prompt(token: float, key: float, length: int) -> None:
    """Its tokens get dearer as they attend to more (`key`: by how much, at its end): that is not put down to the streams."""
    pace, computed = Pace(), 0
    for _ in range(20):
        pace.learn(2, 0, 1.0)
    seconds = []
    while computed < length:
        chunk = int(min(16, max(1, pace.tokens(2, 1))))
        seconds.append(1.0 + chunk * token * (1 + key * computed / length))
        pace.learn(2, chunk, seconds[-1])
        computed += chunk
    assert max(seconds[20:]) <= 2.1  # the pace follows a little behind
    assert pace.decoding(2) <= 1.3


def test_who_is_beside_few_streams_keeps_to_their_pace_and_beside_many_to_what_the_workload_brings() -> None:
    """A plan for 16 requests that bring 4 tokens of prompts for each of an answer, and 2 that decode in a step: floors in tokens."""
    brought = 2 * 4.0
    assert [fewest_tokens(1, 16, brought, filled(there, 16)) for there in (3, 8, 16, 17, 32)] == [5, 12, 24, 13, 24]
    assert filled(0, 16) == 0.0
    assert fewest_tokens(1, 16, brought, 1.0) == KEEPS_UP * brought
    assert fewest_tokens(1, 16, brought, 1.0, least=500) == 500  # as the plan says, of experts
