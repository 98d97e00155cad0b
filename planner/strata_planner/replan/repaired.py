"""One replica that lost devices, on those that it has left: the order kept, the lost layers taken over, bits lowered as memory asks.

Called by `repair`, which knows the whole plan. Nothing is searched: a few micro-batches are tried, each with the borders that `borders` finds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from strata_planner.contract.plan import Plan, Replica, Stage
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.replan.borders import Range, best_borders, spans_of
from strata_planner.replan.holdings import Held, held_by, is_narrowed
from strata_planner.replan.placement import Bits, Placement, Units
from strata_planner.replan.running import placement_on
from strata_planner.replan.spans import Begin, Spans
from strata_planner.search.assembly import assemble
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.problem import Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.layouts.stages import LEAST_CHUNK, with_concurrency
from strata_planner.search.metric import Metric
from strata_planner.search.prediction import predict

Groups = tuple[
    tuple[DeviceGroup, ...], ...
]  # for each stage of the replica as it was: itself, nothing, or what takes its place


@dataclass(frozen=True)
class Repaired:
    """`reach`: so far from a loss stages changed, 1: its neighbours alone."""

    plan: Plan  # of this replica alone
    value: float  # by the request's metric
    reach: int


@dataclass(frozen=True)
class Short:
    """Why it does not fit: bytes that are missing over all stages at the fewest bits, or penalty beyond its bound. Less is nearer."""

    missing_bytes: int
    excess: float


@dataclass(frozen=True)
class _Fit:
    """`bits`: of each layer of every stage."""

    value: float
    candidate: Candidate
    bits: tuple[tuple[int, ...], ...]
    reach: int

    @property
    def widths(self) -> set[int]:
        return {each for stage in self.bits for each in stage}


class Repairing:
    """Of one replica, for as many sequences as `repaired` is asked for. `request`: with the bound of the penalty that repairs keep to."""

    def __init__(self, request: PlanRequest, replica: Replica, fewest_bits: int) -> None:
        self._request, self._replica, self._fewest = request, replica, fewest_bits
        used = {bits for stage in replica.stages for bits in stage.bits}
        self._own = tuple(bits for bits in request.bits if bits in used)
        self._all = tuple(bits for bits in request.bits if bits in used or fewest_bits <= bits <= max(used))
        self._known: dict[tuple[tuple[int, ...], int], _Widths] = {}

    def repaired(self, groups: Groups, sequences: int) -> Repaired | Short:
        """On these devices in this order. At the replica's own widths, or at as few more as it takes: kernels of every width take memory."""
        found = self._at(self._own, sequences).best(groups)
        if not (isinstance(found, _Fit) and found.reach == 1) and self._all != self._own:
            more = self._at(self._all, sequences).best(groups)
            if isinstance(more, Short):
                found = found if isinstance(found, _Fit) else more
            elif isinstance(found, Short) or more.reach < found.reach:
                found = self._closer(more, groups, sequences)
        if isinstance(found, Short):
            return found
        plan = self._at(tuple(sorted(found.widths)), sequences).assembled(found)
        return Repaired(plan, found.value, found.reach)

    def _closer(self, found: _Fit, groups: Groups, sequences: int) -> _Fit:
        """Among the widths that it has: what the kernels of others would have taken keeps bits."""
        widths = tuple(sorted(found.widths | set(self._own)))
        closer = self._at(widths, sequences).best(groups) if widths != self._all else found
        return closer if isinstance(closer, _Fit) and closer.reach <= found.reach else found

    def _at(self, widths: tuple[int, ...], sequences: int) -> "_Widths":
        if (widths, sequences) not in self._known:
            request = replace(with_concurrency(self._request, sequences), allowed_bits=widths)
            self._known[widths, sequences] = _Widths(request, self._replica, self._fewest)
        return self._known[widths, sequences]


class _Widths:
    """The replica among some widths, of which the devices are charged for the kernels."""

    def __init__(self, request: PlanRequest, replica: Replica, fewest_bits: int) -> None:
        self._replica, self._fewest = replica, fewest_bits
        self._pricer = Pricer(request, grouped=False)
        self._units = Units.of(self._pricer.layer_runs)
        self._placement = self._placed([stage.bits for stage in replica.stages])

    def best(self, groups: Groups) -> _Fit | Short:
        placement, pricer = self._placement, self._pricer
        order = tuple(group for each in groups for group in each)
        own, begin = self._own(placement, groups), self._begin(placement, groups)
        fits, short = list[_Fit](), list[Short]()
        for pair, is_last_resort in self._pairs(len(order)):
            if fits and is_last_resort:
                break
            candidate = Candidate(order, pair)
            problem = pricer.problem(candidate)
            spans = Spans(problem, self._units.run, begin)
            borders = best_borders(spans, own)
            if borders is None or not borders.fits:
                short.append(Short(borders.score[0], borders.score[1]) if borders else Short(0, 0.0))
                continue
            placed = Placement(tuple(span.bits for span in spans_of(spans, borders.cuts)))
            found = self._found(candidate, problem, placed)
            value = Metric.for_request(pricer.request).of(predict(pricer, found), pricer.request.workload.concurrency)
            fits.append(_Fit(value, candidate, placed.layer_bits(self._units), borders.reach))
        if not fits:
            return min(short, key=lambda each: (each.missing_bytes, each.excess))
        return max(fits, key=lambda each: (-each.reach, each.value))

    def assembled(self, fit: _Fit) -> Plan:
        """What was found among more widths: without the others layers may be alike that were not."""
        placed = self._placed(fit.bits)
        found = self._found(fit.candidate, self._pricer.problem(fit.candidate), placed)
        return assemble(self._pricer.request, found, self._pricer, fit.bits)

    def _found(self, candidate: Candidate, problem: Problem, placed: Placement) -> Found:
        counts = placed.counts(self._units)
        solution = Solution(SolutionStatus.FEASIBLE, StopReason.SETTLED, counts, problem.objective(counts))
        return Found(candidate, problem, solution)

    def _placed(self, bits: Sequence[Sequence[int]]) -> Placement:
        """`bits`: of each layer of every stage."""
        placed = placement_on(self._units, bits)
        assert placed is not None, "no layers are decided together"
        return placed

    def _pairs(self, stages: int) -> Iterator[tuple[Pair, bool]]:
        """The replica's own micro-batches, as many sequences as there are; larger ones, where fewer stages are to hold them all; and, if neither
        fits, small chunks of prompts, whose steps take little memory.
        """
        batch, most = self._replica.micro_batch, self._pricer.request.workload.concurrency
        chunk, count = batch.max_step_tokens - batch.decode, batch.count if batch.count < stages else 0
        own = Pair(min(batch.prefill, most), min(batch.decode, most), chunk, count)
        even = -(-most // (count or stages))
        whole = dict.fromkeys((own, replace(own, decode=max(own.decode, even))))
        yield from ((pair, False) for pair in whole)
        small = replace(own, prefill=1, chunk=min(chunk, LEAST_CHUNK))
        if small not in whole:
            yield small, True

    def _own(self, placement: Placement, groups: Groups) -> list[Range]:
        """Of each stage there is, the units that it has; none for one that is new."""
        return [
            (first, first + len(bits)) if group.places == stage.places else (first, first)
            for stage, first, bits, each in self._stages(placement, groups)
            for group in each
        ]

    def _begin(self, placement: Placement, groups: Groups) -> Begin:
        again: list[frozenset[int]] = []
        for stage, first, bits, each in self._stages(placement, groups):
            for group in each:
                kept = range(first, first + len(bits)) if group.places == stage.places else range(0)
                held = held_by(stage)
                again.append(frozenset(unit for unit in kept if self._is_read_again(held, unit)))
        return Begin([each for stage in placement.stages for each in stage], self._fewest, again)

    def _stages(
        self, placement: Placement, groups: Groups
    ) -> Iterator[tuple[Stage, int, Bits, tuple[DeviceGroup, ...]]]:
        """Of before: with its first unit, their bits, and the devices that it or its place has now."""
        return zip(self._replica.stages, placement.firsts(), placement.stages, groups, strict=True)

    def _is_read_again(self, held: Held, unit: int) -> bool:
        """Whether fewer bits of it cannot be made of what the stage holds."""
        return not all(is_narrowed(held.layers[layer]) for layer in self._units.layers[unit])
