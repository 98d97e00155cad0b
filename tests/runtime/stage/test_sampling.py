"""Sampling's laws: keyed draws, the filters of temperature, top-k and top-p, log probabilities that add up."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.frames import Sampling
from strata_runtime.stage.sampling import choose, log_probabilities, uniform


def rows(count: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**63), position=st.integers(0, 100_000), others=st.integers(0, 5))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int, others: int) -> None:
    logits = rows(others + 1, 50)
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=seed)
    alone = choose(logits[-1:], [sampling], [position])
    company = choose(
        logits, [Sampling(temperature=1.0, seed=n) for n in range(others)] + [sampling], [0] * others + [position]
    )
    assert company[-1] == alone[0]


def test_uniform_is_uniform() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.01)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=0), {2}),
        (Sampling(temperature=1.0, top_k=1), {2}),
        (Sampling(temperature=5.0, top_k=2), {2, 0}),
        (Sampling(temperature=1.0, top_p=0.5), {2}),
        (Sampling(temperature=1.0, top_p=0.9), {2, 0}),
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
    ],
)
def test_filters_keep_the_most_likely(sampling: Sampling, kept: set[int]) -> None:
    logits = torch.tensor([[math.log(0.3), math.log(0.08), math.log(0.6), math.log(0.02)]])
    drawn = {
        choose(logits, [Sampling(sampling.temperature, sampling.top_p, sampling.top_k, seed)], [1])[0]
        for seed in range(400)
    }
    assert drawn == kept


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)]])
    draws = [choose(logits, [Sampling(seed=seed)], [3])[0] for seed in range(4000)]
    for token, share in enumerate((0.7, 0.2, 0.1)):
        assert draws.count(token) / len(draws) == pytest.approx(share, abs=0.03)


def test_log_probabilities_are_sorted_and_normalised() -> None:
    row = rows(1, 30)[0]
    chosen, top = log_probabilities(row, 4, 30)
    assert dict(top)[4] == pytest.approx(chosen)
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-5)
