"""Sampling: from logits to tokens, on the last stage. Called by the stage executor.

A draw is a function of (seed, position) alone, so a replayed sequence draws what it drew before, in any batch and on any
device. Ties and sums are settled in float32 on the logits as given.
"""

from collections.abc import Sequence

import torch

from strata_planner.contract.frames import Sampling

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def choose(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """A token per row. logits: [rows, vocab] float32; `positions`: the position each row was computed at."""
    greedy = logits.argmax(dim=-1).tolist()
    return [
        token if sampling.temperature == 0 else _draw(row, sampling, uniform(sampling.seed, position))
        for token, row, sampling, position in zip(greedy, logits, samplings, positions, strict=True)
    ]


def _draw(row: torch.Tensor, sampling: Sampling, number: float) -> int:
    """Inverse CDF over the tokens that top-k and top-p (nucleus, Holtzman et al. 2020) leave.

    Most likely first where a filter needs that order; in the vocabulary's order, without sorting it, where none does.
    """
    scores = row / sampling.temperature
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return _inverse(scores.softmax(dim=-1).double().cumsum(dim=-1), number)
    count = min(sampling.top_k, row.numel()) if sampling.top_k > 0 else row.numel()
    values, tokens = scores.sort(descending=True, stable=True) if count == row.numel() else torch.topk(scores, count)
    cumulative = values.softmax(dim=-1).double().cumsum(dim=-1)
    kept = count
    if sampling.top_p < 1:
        kept = min(int(torch.searchsorted(cumulative, sampling.top_p)) + 1, count)
    return int(tokens[_inverse(cumulative[:kept], number)])


def _inverse(cumulative: torch.Tensor, number: float) -> int:
    """The first index whose cumulative weight is above `number` (in [0, 1)) of the whole."""
    index = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    return min(index, cumulative.numel() - 1)


def log_probabilities(row: torch.Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The chosen token's log probability and the `count` most likely (token, log probability). row: [vocab]."""
    logs = row.log_softmax(dim=-1)
    values, tokens = logs.topk(min(count, logs.numel()))
    return float(logs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True))
