import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.perplexity import round_to_nearest, windows


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@given(seed=st.integers(0, 2**31 - 1))
def test_rounding_moves_a_weight_by_at_most_one_level(bits: int, seed: int) -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    groups = weight.view(4, 2, 16)
    level = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / (2**bits - 1)
    moved = (round_to_nearest(weight, bits, 16) - weight).abs().view(4, 2, 16).amax(-1)
    assert (moved <= level * 1.0001).all()
    assert all(len(group.unique()) <= 2**bits for group in round_to_nearest(weight, bits, 16).view(8, 16))


def test_rounding_what_is_rounded_changes_nothing() -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    once = round_to_nearest(weight, 4, 16)
    torch.testing.assert_close(round_to_nearest(once, 4, 16), once)


def test_a_group_that_does_not_divide_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match="group size 24 does not divide 32 inputs: choose a divisor such as 8"):
        round_to_nearest(torch.zeros(2, 32), 4, 24)


@given(st.lists(st.lists(st.integers(1, 99), max_size=40), max_size=5), st.integers(1, 16))
def test_every_token_is_predicted_once(documents: list[list[int]], context: int) -> None:
    rows = list(windows(documents, 0, context))
    assert [token for row in rows for token in row[1:].tolist()] == [token for d in documents for token in d]
    assert all(row[0] == 0 and len(row) <= context + 1 for row in rows)
