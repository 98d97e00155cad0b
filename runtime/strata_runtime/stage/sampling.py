"""Sampling: from logits to tokens, on the last stage. Called by the stage executor for all rows of a step at once.

A draw is a function of (seed, position) alone, so a replayed sequence draws what it drew before, in any batch and on any
device: equally likely tokens are in the vocabulary's order, whatever was sorted to find them. Scores are float32, sums of
weights float64.
"""

from collections.abc import Sequence

import torch

from strata_planner.contract.frames import Sampling

_MASK = (1 << 64) - 1

AT_ONCE = {
    "cpu": 2**17,
    "cuda": 2**21,
}  # logits worked on together: what a processor's cache holds, bounded memory on a GPU
SORTS_ALL = frozenset({"cuda"})  # devices that sort whole rows: nothing is asked of them before a step's tokens
CANDIDATES = 512  # most nuclei have fewer tokens; what needs more is partitioned
MOST_CANDIDATES = 8192  # of a top-k; sorting more takes longer than the partition
BINS, BINS_PER_UNIT = 1024, 32  # of scores below the greatest; a bin's tokens differ by 3 % in weight
COLDEST = 1e-30  # temperature below which float32 has nothing to divide by; it is greedy long before


def uniform(seed: int, position: int, draw: int = 0) -> float:
    """A number in [0, 1) from (seed, position), another one for each draw there: two rounds of splitmix64 (Steele, Lea, Flood 2014)."""
    state = (
        seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + draw * 0xD6E8FEB86659FD93 + 0x94D049BB133111EB
    ) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


def choose(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int], draw: int = 0) -> list[int]:
    """A token per row. logits: [rows, vocab] float32; `positions`: the position each row was computed at; `draw`: which one it is there."""
    vocabulary = logits.shape[1]
    plain: list[int] = []
    filtered: list[int] = []
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0:
            (filtered if _is_limited(sampling) else plain).append(row)
    is_greedy = len(plain) + len(filtered) < len(samplings)
    chosen = _greatest(logits) if is_greedy else torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    at_once = max(AT_ONCE.get(logits.device.type, 2**17) // vocabulary, 1)
    for rows, drawn in ((plain, _draw_from_all), (filtered, _draw_from_most_likely)):
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            those = [samplings[row] for row in some]
            numbers = [uniform(samplings[row].seed, positions[row], draw) for row in some]
            draws = _Draws(logits, some, those, numbers)
            chosen[draws.rows] = drawn(draws)
    return chosen.tolist()


def is_filtered(sampling: Sampling) -> bool:
    """Whether which tokens may be drawn depends on how likely others are."""
    return sampling.temperature > 0 and (sampling.min_p > 0 or _is_limited(sampling))


def _is_limited(sampling: Sampling) -> bool:
    return sampling.top_p < 1 or sampling.top_k > 0


def _greatest(logits: torch.Tensor) -> torch.Tensor:
    """Of each row the first of its greatest. [rows]"""
    if logits.device.type == "cpu":  # a tenth of the time of torch's
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


class _Draws:
    """The rows that are drawn together. `scores`: [rows, vocab], 0 for the most likely token and below for the others."""

    def __init__(
        self, logits: torch.Tensor, rows: list[int], samplings: Sequence[Sampling], numbers_drawn: Sequence[float]
    ) -> None:
        vocabulary = logits.shape[1]
        kept = [min(each.top_k, vocabulary) if each.top_k > 0 else vocabulary for each in samplings]
        numbers = _on_device(
            [
                rows,
                [max(each.temperature, COLDEST) for each in samplings],
                [each.min_p for each in samplings],
                numbers_drawn,
                kept,
                [each.top_p for each in samplings],
            ],
            logits.device,
        )
        self.rows = numbers[0].long()
        scores = logits[self.rows]  # a copy
        scores -= scores.amax(dim=-1, keepdim=True)  # first: the greatest is 0 then, at any temperature
        self.scores = scores.div_(numbers[1].float()[:, None])
        if any(each.min_p > 0 for each in samplings):  # Nguyen et al. 2024: of what is left top-k and top-p see
            self.scores.masked_fill_(self.scores < numbers[2].float().log()[:, None], -torch.inf)
        self.numbers, self.top_k, self.top_p = numbers[3], numbers[4].long(), numbers[5]
        self.unlimited = vocabulary in kept  # some row has no top-k
        wanted = [CANDIDATES if count == vocabulary else count + 16 for count in kept]  # more: for ties at the end
        sorts_all = logits.device.type in SORTS_ALL
        self.candidates = vocabulary if sorts_all else min(max(wanted), MOST_CANDIDATES, vocabulary)


def _draw_from_all(draws: _Draws) -> torch.Tensor:
    """Inverse CDF in the vocabulary's order, without sorting it. [rows]"""
    cumulative = draws.scores.exp_().cumsum(dim=-1, dtype=torch.float64)
    target = draws.numbers * cumulative[:, -1]
    return _search(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)


def _draw_from_most_likely(draws: _Draws) -> torch.Tensor:
    """Inverse CDF over the tokens that top-k and top-p (nucleus, Holtzman et al. 2020) leave, most likely first. [rows]

    Only the first candidates are sorted. Those that are as likely as the last one are not trusted: more may be outside.
    """
    vocabulary = draws.scores.shape[1]
    values, tokens = _most_likely(draws.scores, draws.candidates)
    cumulative = values.exp().cumsum(dim=-1, dtype=torch.float64)
    in_top_k = _at(cumulative, draws.top_k - 1)
    mass = in_top_k
    if draws.unlimited:
        total = draws.scores.exp().sum(dim=-1, dtype=torch.float64)
        mass = torch.where(draws.top_k < vocabulary, in_top_k, total)
    nucleus = _search(cumulative, draws.top_p * mass)
    last = torch.where(draws.top_p < 1, nucleus, vocabulary).minimum(draws.top_k - 1)
    target = draws.numbers * _at(cumulative, last)
    place = _search(cumulative, target, right=True).minimum(last)
    chosen = _at(tokens, place)
    if values.shape[1] == vocabulary:
        return chosen
    trusted = (values > values[:, -1:]).sum(dim=-1)
    settled = (last < trusted) & ((draws.top_k <= trusted) | (draws.top_k == vocabulary))
    for row in (~settled).nonzero().flatten().tolist():
        chosen[row] = _Partition(draws.scores[row]).draw(
            int(draws.top_k[row]), float(draws.top_p[row]), float(draws.numbers[row])
        )
    return chosen


def _most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest `count` scores of each row with their tokens, greatest first, ties in the vocabulary's order."""
    if count == scores.shape[1]:
        values, tokens = scores.sort(dim=-1, descending=True, stable=True)
        return values, tokens
    tokens = scores.topk(count).indices.sort(dim=-1).values
    values, order = scores.gather(1, tokens).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


class _Partition:
    """A row whose tokens are in bins by score: only the bins that hold the end of the nucleus and the draw are sorted."""

    def __init__(self, scores: torch.Tensor) -> None:
        self._scores = scores.nan_to_num(nan=-torch.inf)
        self._bins = (self._scores * -BINS_PER_UNIT).clamp_(0, BINS - 1).to(torch.int64)
        # The last alone, of a row without a number.
        self._first, self._last = (int(each) for each in self._bins.aminmax())
        weights = self._scores.exp().double()
        self._mass = torch.zeros(BINS, dtype=torch.float64, device=scores.device)
        self._mass = self._mass.scatter_add_(0, self._bins, weights).cumsum(dim=0)
        self._count = self._bins.bincount(minlength=BINS).cumsum(dim=0)

    def draw(self, top_k: int, top_p: float, number: float) -> int:
        mass = float(self._mass[-1]) if top_k == self._scores.numel() else self._mass_of(top_k)
        if top_p < 1:
            place, tokens, cumulative = self._find(top_p * mass, right=False)
            mass = min(float(cumulative[place]), mass)
        place, tokens, _ = self._find(number * mass, right=True)
        return int(tokens[place])

    def _mass_of(self, count: int) -> float:
        """Of the first `count` tokens."""
        bin_ = int(torch.searchsorted(self._count, count))
        before = int(self._count[bin_ - 1]) if bin_ else 0
        return float(self._sorted(bin_)[1][count - before - 1])

    def _find(self, mass: float, *, right: bool) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The place in its bin, the bin's tokens and their cumulative weights of the first token to reach `mass`, or pass it."""
        bin_ = max(self._first, min(int(torch.searchsorted(self._mass, mass, right=right)), self._last))
        tokens, cumulative = self._sorted(bin_)
        place = int(torch.searchsorted(cumulative, mass, right=right))
        return min(place, tokens.numel() - 1), tokens, cumulative

    def _sorted(self, bin_: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The bin's tokens, most likely first, and the weight of all up to each."""
        tokens = (self._bins == bin_).nonzero().flatten()
        values, order = self._scores[tokens].sort(descending=True, stable=True)
        before = self._mass[bin_ - 1] if bin_ else 0.0
        return tokens[order], values.exp().cumsum(dim=0, dtype=torch.float64) + before


def _on_device(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    """float64 [len(rows), n]: integers below 2^53 are exact. One transfer, which waits for nothing that the device has to do."""
    numbers = torch.tensor(rows, dtype=torch.float64)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def _search(cumulative: torch.Tensor, target: torch.Tensor, *, right: bool = False) -> torch.Tensor:
    """In each row the first place whose cumulative weight reaches its target, or passes it. [rows]"""
    return torch.searchsorted(cumulative, target[:, None], right=right)[:, 0]


def _at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """One element of each row; of places beyond the last the last. [rows]"""
    return rows.gather(1, places.clamp(max=rows.shape[1] - 1)[:, None])[:, 0]


def log_probabilities(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[tuple[float, list[tuple[int, float]], int]]:
    """For each row the chosen token's log probability, its `count` most likely (token, log probability), and its rank, 1 for the most likely.

    logits: [rows, vocab]
    """
    if not tokens:
        return []
    logs = logits.log_softmax(dim=-1)
    values, likely = logs.topk(min(max(counts), logs.shape[1]))
    chosen = _at(logs, torch.tensor(tokens, device=logs.device))
    ranks = (logs > chosen[:, None]).sum(dim=-1) + 1
    rows = zip(chosen.tolist(), likely.tolist(), values.tolist(), ranks.tolist(), counts, strict=True)
    return [(own, list(zip(ids[:count], best[:count], strict=True)), rank) for own, ids, best, rank, count in rows]
