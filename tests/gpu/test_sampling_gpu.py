"""Sampling on a GPU: the tokens that a processor draws of the same logits, and nothing waited for before they are copied back."""

import pytest
import torch

from strata_planner.contract.frames import Sampling
from strata_runtime.stage.sampling import choose, log_probabilities

pytestmark = pytest.mark.gpu

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.0, top_k=40, seed=2),
    Sampling(temperature=0.9, top_p=0.9, seed=3),
    Sampling(temperature=1.5, top_p=0.99, top_k=9000, min_p=0.01, seed=4),
]


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, 32000, generator=torch.Generator().manual_seed(rows)) * 3


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_the_draws_are_those_of_a_processor(rows: int) -> None:
    scores, samplings = logits(rows), [SAMPLINGS[row % len(SAMPLINGS)] for row in range(rows)]
    drawn = choose(scores.cuda(), samplings, range(rows))
    assert drawn == choose(scores, samplings, range(rows))
    here, there = (log_probabilities(each, drawn, [3] * rows) for each in (scores, scores.cuda()))
    for (own, likely, rank), (other, others, other_rank) in zip(here, there, strict=True):
        assert rank == other_rank
        assert [token for token, _ in likely] == [token for token, _ in others]
        assert own == pytest.approx(other, abs=1e-4)


def test_the_host_waits_once_for_all_rows() -> None:
    scores, samplings = logits(10).cuda(), SAMPLINGS * 2
    choose(scores, samplings, range(10))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as seen:
        choose(scores, samplings, range(10))
    copies = [event for event in seen.events() if "DtoH" in event.name]
    assert len(copies) == 1
