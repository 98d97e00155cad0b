"""Where the borders of a repaired pipeline lie: the neighbours of what was lost take its layers; where that does not suffice, so do theirs.

Called by `repair`. A stage that survives keeps the layers it holds as long as those nearer to the loss can take the rest. Knows ranges of
units and what a stage makes of one (`spans`), no devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from strata_planner.replan.spans import Span, Spans

Range = tuple[int, int]  # first unit, end
Cuts = tuple[int, ...]  # the first unit of every stage, and the end of the last
Score = tuple[int, float, float]  # bytes that are short, penalty beyond its bound, the objective: less is better

_ROUNDS = 4  # of the borders of several losses, which depend on each other where a survivor lies between two
_MOST_MOVES = 150  # of single borders while a window is evened out
_ROUNDING = 1e-9  # of a sum


@dataclass(frozen=True)
class Borders:
    """`reach`: so far from a loss stages changed, 1: its neighbours alone."""

    cuts: Cuts
    score: Score
    reach: int

    @property
    def fits(self) -> bool:
        return self.score[:2] == (0, 0.0)


def spans_of(spans: Spans, cuts: Cuts) -> list[Span]:
    return [spans.of(j, cuts[j], cuts[j + 1]) for j in range(len(cuts) - 1)]


def best_borders(spans: Spans, own: Sequence[Range]) -> Borders | None:
    """The nearest that fit, or those that are least short. `own[j]`: the units that stage j has now, an empty range at its place for a
    stage that is new. None where there are more stages than units.
    """
    if len(own) > spans.units:
        return None
    best = _neighbours(spans, own)
    reach = 1
    while not best.fits and reach < len(own):
        reach *= 2
        wider = _reshuffled(spans, own, best.cuts, reach)
        best = min(best, wider, key=lambda each: each.score)
    return best


def _score(spans: Spans, cuts: Cuts) -> Score:
    found, problem = spans_of(spans, cuts), spans.problem
    short = sum(max(0, -each.free_bytes) for each in found)
    penalty = sum(each.penalty for each in found)
    excess = max(0.0, penalty - problem.penalty_bound * (1 + _ROUNDING))
    return short, excess, problem.latency_of([each.seconds for each in found]) + problem.theta * penalty


def _neighbours(spans: Spans, own: Sequence[Range]) -> Borders:
    """Every border in a gap tried everywhere, the others as they are, until none moves."""
    cuts, limits = _begun(spans, own)
    score = _score(spans, cuts)
    movable = [k for k, (low, high) in enumerate(limits) if low < high]
    for _ in range(_ROUNDS if len(movable) > 1 else 1):
        before = cuts
        for k in movable:
            low, high = max(limits[k][0], cuts[k - 1] + 1), min(limits[k][1], cuts[k + 1] - 1)
            tried = [(*cuts[:k], at, *cuts[k + 1 :]) for at in range(low, high + 1)]
            score, cuts = min((_score(spans, each), each) for each in tried)
        if cuts == before:
            break
    return Borders(cuts, score, 1)


def _begun(spans: Spans, own: Sequence[Range]) -> tuple[Cuts, list[Range]]:
    """Borders to begin with, gaps shared out evenly, and how far each may move: from the end of what is held before it to the begin of
    what is held behind.
    """
    stages, last = len(own), spans.units
    limits: list[Range] = [(0, 0)]
    for k in range(1, stages):
        low = next((own[j][1] for j in range(k - 1, -1, -1) if own[j][1] > own[j][0]), 0)
        high = next((own[j][0] for j in range(k, stages) if own[j][1] > own[j][0]), last)
        limits.append((low, high))
    cuts = [0]
    for k in range(1, stages):
        low, high = limits[k]
        same = [each for each in range(1, stages) if limits[each] == limits[k]]
        begin = low + (high - low) * (same.index(k) + 1) // (len(same) + 1)
        cuts.append(max(cuts[-1] + 1, min(begin, last - (stages - k))))
    return (*cuts, last), [*limits, (last, last)]


def _reshuffled(spans: Spans, own: Sequence[Range], cuts: Cuts, reach: int) -> Borders:
    """Stages at most so far from a gap share their units anew: the lost ones go one by one to where they cost the least time."""
    for first, end in _windows(own, spans.units, reach):
        counts = _shared(spans, own, range(first, end), cuts[end] - cuts[first])
        if counts is not None:
            at, inside = cuts[first], list[int]()
            for count in counts[:-1]:
                at += count
                inside.append(at)
            cuts = (*cuts[: first + 1], *inside, *cuts[end:])
        cuts = _evened(spans, cuts, range(first + 1, end))
    return Borders(cuts, _score(spans, cuts), reach)


def _windows(own: Sequence[Range], units: int, reach: int) -> list[Range]:
    """Runs of stages at most `reach` from a gap, each of which shares its units apart from the others."""
    stages, near = len(own), set[int]()
    ends = [0, *(end for _, end in own)]
    firsts = [*(first for first, _ in own), units]
    for k in range(stages + 1):  # the gap in front of stage k
        if firsts[k] > ends[k] or (k < stages and own[k][0] == own[k][1]):
            near |= {j for j in range(k - reach, k + reach) if 0 <= j < stages}
    found: list[Range] = []
    for j in sorted(near):
        if found and found[-1][1] == j:
            found[-1] = (found[-1][0], j + 1)
        else:
            found.append((j, j + 1))
    return found


def _shared(spans: Spans, own: Sequence[Range], window: range, units: int) -> list[int] | None:
    """How many each stage of the window has. None where they do not all fit."""
    counts = {j: max(1, own[j][1] - own[j][0]) for j in window}
    most = {j: spans.most_units(j) for j in window}
    pace = {j: spans.seconds_of_a_unit(j) for j in window}
    for j in window:
        counts[j] = max(1, min(counts[j], most[j]))
    for _ in range(abs(units - sum(counts.values()))):
        if sum(counts.values()) < units:
            able = [j for j in window if counts[j] < most[j]]
            if not able:
                return None
            counts[min(able, key=lambda j: ((counts[j] + 1) * pace[j], j))] += 1
        else:
            able = [j for j in window if counts[j] > 1]
            counts[max(able, key=lambda j: (counts[j] * pace[j], j))] -= 1
    return [counts[j] for j in window]


def _evened(spans: Spans, cuts: Cuts, movable: range) -> Cuts:
    """One border moved by one unit, as long as that is better."""
    score, moves = _score(spans, cuts), 0
    better = True
    while better and moves < _MOST_MOVES:
        better = False
        for k in movable:
            for at in (cuts[k] - 1, cuts[k] + 1):
                if not cuts[k - 1] < at < cuts[k + 1]:
                    continue
                moves += 1
                other = (*cuts[:k], at, *cuts[k + 1 :])
                if (found := _score(spans, other)) < score:
                    score, cuts, better = found, other, True
    return cuts
