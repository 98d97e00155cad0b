"""Sampling's laws: keyed draws, the filters of temperature, top-k and top-p, log probabilities that add up."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.frames import Sampling
from strata_runtime.stage import sampling as module
from strata_runtime.stage.sampling import choose, log_probabilities, uniform
from tests.laws import share


def rows(count: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=share(50), deadline=None)
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
    seeded = [Sampling(sampling.temperature, sampling.top_p, sampling.top_k, seed) for seed in range(400)]
    assert set(choose(logits.repeat(400, 1), seeded, [1] * 400)) == kept


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)]])
    draws = choose(logits.repeat(4000, 1), [Sampling(seed=seed) for seed in range(4000)], [3] * 4000)
    for token, chance in enumerate((0.7, 0.2, 0.1)):
        assert draws.count(token) / len(draws) == pytest.approx(chance, abs=0.03)


def test_log_probabilities_are_sorted_and_normalised() -> None:
    row = rows(1, 30)[0]
    [(chosen, top, rank), (_, one, _)] = log_probabilities(torch.stack([row, row]), [4, 4], [30, 1])
    assert one == top[:1]
    assert top[rank - 1][0] == 4
    assert dict(top)[4] == pytest.approx(chosen)
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-5)


def sorted_whole(row: torch.Tensor, sampling: Sampling, number: float) -> set[int]:
    """The definition: sort everything, keep the first k, of them the nucleus, and invert the CDF there.

    All tokens that rounding may choose: those within 1e-6 of the draw.
    """
    values, tokens = (row.double() / sampling.temperature).sort(descending=True, stable=True)
    count = min(sampling.top_k, row.numel()) if sampling.top_k > 0 else row.numel()
    cumulative = values[:count].softmax(dim=-1).cumsum(dim=-1)
    chosen = set()
    for error in (-1e-6, 0.0, 1e-6):
        kept = count
        if sampling.top_p < 1:
            kept = min(int(torch.searchsorted(cumulative, sampling.top_p + error)) + 1, count)
        for more in (-1e-6, 0.0, 1e-6):
            target = (number + more) * float(cumulative[kept - 1])
            chosen.add(int(tokens[min(int(torch.searchsorted(cumulative[:kept], target, right=True)), kept - 1)]))
    return chosen


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 2.0),
    top_p=st.floats(0.01, 1.0) | st.just(1.0),
    top_k=st.sampled_from([0, 1, 2, 7, 60, 700, 5000]) | st.integers(0, 900),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=share(60), deadline=None)
@given(
    rows_of=st.lists(samplings, min_size=1, max_size=5),
    spread=st.sampled_from([0.01, 0.3, 1.0, 4.0, 30.0]),
    vocabulary=st.sampled_from([3, 100, 900, 3000]),
    candidates=st.sampled_from([1, 8, 64, 512]),
    seed=st.integers(0, 1000),
)
def test_what_is_drawn_is_what_sorting_all_would_give(
    rows_of: list[Sampling], spread: float, vocabulary: int, candidates: int, seed: int
) -> None:
    logits = rows(len(rows_of), vocabulary, seed) * spread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CANDIDATES", candidates)
        patch.setattr(module, "MOST_CANDIDATES", candidates)
        patch.setitem(module.AT_ONCE, "cpu", 2 * vocabulary)
        drawn = choose(logits, rows_of, range(len(rows_of)))
    for position, (row, sampling) in enumerate(zip(logits, rows_of, strict=True)):
        if sampling.top_p >= 1 and not 0 < sampling.top_k < vocabulary:
            continue  # in the vocabulary's order: the law below
        assert drawn[position] in sorted_whole(row, sampling, uniform(sampling.seed, position))


@settings(max_examples=share(60), deadline=None)
@given(
    rows_of=st.lists(samplings | st.just(Sampling(temperature=0)), min_size=1, max_size=5),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    vocabulary=st.sampled_from([3, 900, 3000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    least=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1000),
)
def test_a_device_that_sorts_whole_rows_draws_the_same(
    rows_of: list[Sampling], spread: float, vocabulary: int, dtype: torch.dtype, least: float, seed: int
) -> None:
    """What GPUs do, on a processor: nothing is settled row by row."""
    rows_of = [structs.replace(each, min_p=least) for each in rows_of]
    logits = (rows(len(rows_of), vocabulary, seed) * spread).to(dtype).float()
    expected = choose(logits, rows_of, range(len(rows_of)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SORTS_ALL", {"cpu"})
        patch.delattr(module, "_Partition")
        assert choose(logits, rows_of, range(len(rows_of))) == expected


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=700), Sampling(), Sampling(temperature=0)])
def test_a_row_without_numbers_ends_no_step(odd: float, sampling: Sampling) -> None:
    logits = rows(2, 2000)
    logits[0] = odd
    drawn = choose(logits, [sampling, sampling], [0, 0])
    assert all(0 <= token < 2000 for token in drawn)
    assert drawn[1] == choose(logits[1:], [sampling], [0])[0]


@settings(max_examples=share(40), deadline=None)
@given(seed=st.integers(0, 2**63 - 1), temperature=st.floats(0.05, 2.0), vocabulary=st.integers(1, 400))
def test_without_a_filter_the_vocabulary_is_not_sorted(seed: int, temperature: float, vocabulary: int) -> None:
    logits = rows(1, vocabulary, seed % 1000)
    [drawn] = choose(logits, [Sampling(temperature, seed=seed)], [5])
    cumulative = (logits[0].double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    number = uniform(seed, 5)
    assert drawn in {
        min(int(torch.searchsorted(cumulative, number + error, right=True)), vocabulary - 1)
        for error in (-1e-6, 0.0, 1e-6)
    }


@settings(max_examples=share(40), deadline=None)
@given(
    sampling=samplings.filter(lambda each: each.top_p < 1 or each.top_k > 0),
    companion=samplings,
    candidates=st.sampled_from([4, 32, 512]),
    seed=st.integers(0, 1000),
)
def test_ties_are_drawn_alike_in_any_batch(sampling: Sampling, companion: Sampling, candidates: int, seed: int) -> None:
    """Logits that were computed in bfloat16 have many: how many candidates were sorted must not show."""
    logits = rows(2, 600, seed).to(torch.bfloat16).float().round()
    alone = choose(logits[:1], [sampling], [3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CANDIDATES", candidates)
        patch.setattr(module, "MOST_CANDIDATES", candidates)
        assert choose(logits, [sampling, companion], [3, 4])[:1] == alone


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}])
def test_the_colder_the_greedier(temperature: float, filters: dict[str, float]) -> None:
    logits = rows(4, 700)
    greedy = logits.argmax(dim=-1).tolist()
    drawn = choose(logits, [Sampling(temperature, seed=seed, **filters) for seed in range(4)], range(4))
    assert drawn == greedy
