"""The best of several ways to group a pipeline's devices, under every load at once, as estimated.

Called by `pipelines`. Layers are dealt as fractions, and all layers have the same bits, or two neighbouring widths that fill the memory. A rate that
no deal of layers passes comes first, so that only those ways are looked at, at each load, that may be the best. Ways of as many stages are worked
out together: arrays are [stages, ways x columns] (`stages.Columns`), few of which cost hardly less than many.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_planner.question.cluster import DeviceGroup
from strata_planner.search.layouts.stages import Floats, Kind, Split, Stages
from strata_planner.search.layouts.water import capped, cheapest_first, level
from strata_planner.search.steady import Load, StageSteps, long_rounds, steady

Indices = npt.NDArray[np.intp]

# Of the best that a way makes of a load with layers dealt evenly: only what is so near is dealt otherwise too, which seldom gains a tenth.
_NEAR = 0.8
_SURE = 1.01  # by which a bound may be passed: steady states are told to within less
_AT_ONCE = 1 << 15  # stages times columns, about what fits a processor's cache
_MOST_AT_ONCE = 1 << 20  # of which tables are there together: a dozen arrays of 8 MiB
_FEW = 4096  # stages times columns, which are estimated sooner than bounded
# Of ways of as many stages, of looking at them at some loads, and of each of these: as `Ways.work` counts.
_WORK_BESIDE, _WORK_OF_STEADY, _WORK_OF_BOUND, _PER_WORK, _BOUNDS_PER_WORK = 700, 1400, 700, 2.5, 10


class Way(NamedTuple):
    """Devices of the stages, and what stands for them (`Stages.table`)."""

    kinds: tuple[Kind, ...]
    order: tuple[DeviceGroup, ...]


class Estimate(NamedTuple):
    """Per rung of the ladder: tokens a second, seconds of one request, seconds that its bits cost, the place of the way and its split; rate 0 and
    place -1 where nothing fits.
    """

    rates: Floats
    seconds: Floats
    penalties: Floats
    places: Indices
    splits: tuple[Split | None, ...]


class Ways:
    """`work`: that they took, about a microsecond each."""

    def __init__(self, stages: Stages, ways: Sequence[Way]) -> None:
        self._stages = stages
        self._is_lean = sum(_size(stages, len(way.order)) for way in ways) > _MOST_AT_ONCE
        together = (_OfStages(stages, [ways[place] for place in each], each) for each in _together(stages, ways))
        self._alike = list(self._in_turn(together))

    @property
    def work(self) -> int:
        return sum(each.work for each in self._alike)

    def estimate(self) -> Estimate:
        """For each number of sequences in flight; of equals the first."""
        known = np.zeros(len(self._stages.rungs))
        many = [each for each in self._alike if each.is_large]
        most = np.max([each.most for each in self._in_turn(many)], axis=0) if many else known
        for each in self._in_turn(self._alike):
            if each.is_large:
                each.offer_best(most)
            else:
                each.offer_all()
            known = np.maximum(known, each.best_rates)
        for each in self._in_turn(many):
            each.offer_even(known)
            known = np.maximum(known, each.best_rates)
        for each in self._in_turn(many):
            each.offer_uneven(known)
        for each in self._in_turn(self._alike):
            each.offer_mixed()
        return _best([each.of_rungs() for each in self._alike], len(known))

    def _in_turn(self, alike: Iterable["_OfStages"]) -> Iterator["_OfStages"]:
        """Only one of which has its tables, where all of them are too large."""
        for each in alike:
            yield each
            if self._is_lean:
                each.forget()


def _size(stages: Stages, count: int) -> int:
    """Numbers of an array of one way of so many stages."""
    return count * len(stages.columns(count).width)


def _together(stages: Stages, ways: Sequence[Way]) -> Iterator[list[int]]:
    """Places of ways of as many stages, of many so many that their tables are no larger than wished."""
    places: dict[int, list[int]] = {}
    for place, way in enumerate(ways):
        places.setdefault(len(way.order), []).append(place)
    for count, each in places.items():
        size = max(1, _MOST_AT_ONCE // _size(stages, count))
        yield from (each[at : at + size] for at in range(0, len(each), size))


class _OfStages:
    """Ways of as many stages; `places`: among all."""

    def __init__(self, stages: Stages, ways: Sequence[Way], places: Sequence[int]) -> None:
        self._stages, self._request = stages, stages.request
        self._count, self._places = len(ways[0].order), np.array(places)
        self._columns = stages.columns(self._count)
        self._each = len(self._columns.width)
        self._ways, layers = ways, self._request.model.num_layers
        fits = (self._tables.most.sum(axis=0) >= layers) & (self._tables.most.min(axis=0) >= 1)
        self._fits = fits & np.tile(self._columns.worth, len(ways))
        self._rates, self._seconds, self._penalties = (np.zeros(len(self._fits)) for _ in range(3))
        self._able = np.flatnonzero(
            self._fits & np.tile(self._penalty[self._columns.width] <= self._most_penalty, len(ways))
        )
        self.work = _WORK_BESIDE

    @cached_property
    def _tables(self) -> "_Tables":
        steps, room = _steps(self._stages, self._ways, self._each)
        return _Tables(steps, room, np.minimum(np.floor(room), self._request.model.num_layers))

    def forget(self) -> None:
        """The tables, which are made anew when they are asked for."""
        self.__dict__.pop("_tables", None)

    @property
    def best_rates(self) -> Floats:
        """[rungs] of what was offered."""
        best: Floats = self._grid(self._rates).max(axis=(0, 1, 3))
        return best

    @cached_property
    def most(self) -> Floats:
        """[rungs] That no way passes with all layers at one width."""
        most: Floats = self._grid(self._bounds).max(axis=(0, 1, 3))
        return most

    @property
    def is_large(self) -> bool:
        """Whether it is worth to leave something out."""
        return int(self._able.size) * self._count > _FEW

    def offer_all(self) -> None:
        self._offer(self._able, (_evenly, *_UNEVENLY) if self._count > 1 else (_evenly,))

    def offer_best(self, most: Floats) -> None:
        """What may reach the rates [rungs] that none passes."""
        self._offer(self._able[self._bounds[self._able] >= most[self._rung(self._able)]], (_evenly,))

    def offer_even(self, known: Floats) -> None:
        """What may be better than the rates [rungs] that are known."""
        chosen = self._promising(self._able, known)
        self._offer(chosen[self._rates[chosen] == 0], (_evenly,))

    def offer_uneven(self, known: Floats) -> None:
        """Of several stages, what may be better than the rates [rungs] that are known, where even ones were nearly the best of their way."""
        if self._count == 1:
            return
        best = self._best_of_ways
        chosen = self._able[self._rates[self._able] > 0]
        chosen = chosen[self._rates[chosen] >= _NEAR * best[chosen // self._each, self._rung(chosen)]]
        self._offer(self._promising(chosen, known), _UNEVENLY)

    @property
    def _best_of_ways(self) -> Floats:
        """[ways, rungs]."""
        best: Floats = self._grid(self._rates).max(axis=(1, 3))
        return best

    def offer_mixed(self) -> None:
        """Where layers of more bits do not fit all: of the two widths the mixture of whole layers that fills all stages. Another is seldom better, as
        seconds and penalty are both nearly proportional to how many layers have more bits. Comes last: bounds say nothing of mixtures.
        """
        if not (self._request.theta or self._request.penalty_bound):
            return
        dearer = np.roll(self._fits, -1)  # the next width of the same load
        runs = np.roll(self._tables.room.min(axis=0), -1) > 0
        is_last = np.arange(len(self._fits)) % self._columns.widths == self._columns.widths - 1
        for chosen in self._in_parts(np.flatnonzero(self._fits & ~dearer & runs & ~is_last)):
            self._mix(chosen)

    def of_rungs(self) -> Estimate:
        """The best of each rung, of equals the first."""
        at, rates = (
            self._grid(each).transpose(2, 0, 1, 3).reshape(len(self._stages.rungs), -1)
            for each in (np.arange(len(self._fits)), self._rates)
        )
        best = at[np.arange(len(at)), rates.argmax(axis=1)]
        found = self._rates[best] > 0
        split = best % self._each // (self._each // len(self._columns.splits))
        splits = tuple(self._columns.splits[each] if there else None for each, there in zip(split, found, strict=True))
        places = np.where(found, self._places[best // self._each], -1)
        return Estimate(self._rates[best], self._seconds[best], self._penalties[best], places, splits)

    def _grid(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """[ways, splits, rungs, widths], of values [ways x columns]."""
        columns = self._columns
        return values.reshape(-1, len(columns.splits), len(self._stages.rungs), columns.widths)

    def _rung(self, chosen: Indices) -> Indices:
        found: Indices = self._columns.rung[chosen % self._each]
        return found

    def _load(self, chosen: Indices) -> Load:
        return self._columns.load.at(chosen % self._each)

    def _width(self, chosen: Indices) -> Indices:
        return self._columns.width[chosen % self._each]

    def _promising(self, chosen: Indices, known: Floats) -> Indices:
        """Those of `chosen` whose bounds are not below the rates [rungs] that are known."""
        return chosen[self._bounds[chosen] * _SURE >= known[self._rung(chosen)]]

    def _in_parts(self, chosen: Indices) -> Iterator[Indices]:
        size = max(1, _AT_ONCE // self._count)
        return (chosen[at : at + size] for at in range(0, chosen.size, size))

    def _offer(self, chosen: Indices, deals: Sequence["_Deal"]) -> None:
        for part in self._in_parts(chosen):
            dealt = self._dealt(self._tables.steps.at(part), part, deals)
            again = np.tile(part, len(dealt))
            penalty = self._request.theta * self._penalty[self._width(again)]
            self._keep(part, self._load(again), self._tables.steps.at(again).of(np.concatenate(dealt, axis=1)), penalty)

    def _keep(self, chosen: Indices, load: Load, steps: StageSteps, penalty: Floats) -> None:
        """Where it is better than what was; of each of `chosen` as many as there are deals. `penalty`: what bits cost, in seconds of the batch."""
        self.work += _WORK_OF_STEADY + round(load.in_flight.size * self._count / _PER_WORK)
        running = steady(steps, load)
        rates = load.in_flight * load.output_tokens / (load.in_flight / running.requests_per_second + penalty)
        a_request = running.first_token + (load.output_tokens - 1) * running.next_token
        best = rates.reshape(-1, chosen.size).argmax(axis=0) * chosen.size + np.arange(chosen.size)
        rates, a_request, penalty = rates[best], a_request[best], penalty[best]
        better = rates > self._rates[chosen]
        for known, offered in ((self._rates, rates), (self._seconds, a_request), (self._penalties, penalty)):
            known[chosen[better]] = offered[better]

    @cached_property
    def _bounds(self) -> Floats:
        """[ways x columns] Tokens a second that no deal of layers at one width passes; 0 where nothing fits."""
        found = np.zeros(len(self._fits))
        for part in self._in_parts(self._able):
            self.work += _WORK_OF_BOUND + round(part.size * self._count / _BOUNDS_PER_WORK)
            load = self._load(part)
            requests = _most_requests(
                self._tables.steps.at(part), load, self._tables.most[:, part], self._request.model.num_layers
            )
            penalty = self._request.theta * self._penalty[self._width(part)]
            found[part] = load.in_flight * load.output_tokens / (load.in_flight / requests + penalty)
        return found

    def _mix(self, chosen: Indices) -> None:
        room, layers = self._tables.room, self._request.model.num_layers
        low, high = (room[:, at].sum(axis=0) for at in (chosen, chosen + 1))
        whole = np.floor(room[:, chosen]).sum(axis=0)  # a part of a layer that is left in a stage is left
        share = np.floor(layers * np.clip((whole / layers - 1) / np.maximum(low / high - 1, 1e-9), 0.0, 1.0)) / layers
        width = self._width(chosen)
        penalty = (1 - share) * self._penalty[width] + share * self._penalty[width + 1]
        kept = penalty <= self._most_penalty
        chosen, share, penalty = chosen[kept], share[kept], penalty[kept]
        if not chosen.size:
            return
        load, dealt = self._load(chosen), np.maximum(1.0, room[:, chosen] * (layers / low[kept]))
        cheap, dear = self._tables.steps.at(chosen).of(dealt), self._tables.steps.at(chosen + 1).of(dealt)
        self._keep(chosen, load, cheap.towards(dear, share), self._request.theta * penalty)

    @cached_property
    def _penalty(self) -> Floats:
        """[widths] of all layers."""
        return np.array([self._stages.penalty[bits] for bits in self._request.bits])

    @cached_property
    def _most_penalty(self) -> float:
        bound = self._request.penalty_bound
        return math.inf if bound is None else bound

    def _dealt(self, steps: "_Steps", chosen: Indices, deals: Sequence["_Deal"]) -> list[Floats]:
        """Layers of the stages."""
        layers, most, load = self._request.model.num_layers, self._tables.most[:, chosen], self._load(chosen)
        _, long = long_rounds(load, load.in_flight, load.prompt_steps)
        # What a request takes of a step's seconds, over all the steps that it is part of.
        a_request = load.output_tokens / self._columns.decode_size[chosen % self._each]
        work = (steps.decode + long * steps.prompts) * a_request
        beside = (steps.fixed_decode + long * steps.fixed_prompts) * a_request
        return [deal(work, beside, most, layers, load.micro_batches) for deal in deals]


# As `water.capped`.
_Deal = Callable[[Floats, Floats, Floats, int, Floats], Floats]


def _evenly(work: Floats, beside: Floats, most: Floats, layers: int, _: Floats) -> Floats:
    return level(work, beside, most, layers)


def _cheapest(work: Floats, _: Floats, most: Floats, layers: int, __: Floats) -> Floats:
    return cheapest_first(work, most, layers)


_UNEVENLY: tuple[_Deal, ...] = (_cheapest, capped)


class _Tables(NamedTuple):
    """`room`: layers that each stage holds [stages, ways x columns], as a fraction; `most`: whole ones, of the model's."""

    steps: "_Steps"
    room: Floats
    most: Floats


class _Steps:
    """Seconds as arrays of `values`, [stages, ways x columns] each, `varies` among them."""

    def __init__(self, values: Floats) -> None:
        self._values = values
        self.prompts, self.decode, self.fixed_prompts, self.fixed_decode, self.begun = values[:5]
        self.send_prompts, self.send, self.latency, self.varies = values[5:]

    def at(self, chosen: Indices) -> "_Steps":
        """At these columns alone."""
        return _Steps(self._values[:, :, chosen])

    def of(self, dealt: Floats) -> StageSteps:
        """With so many layers on each stage."""
        decode, prompts = dealt * self.decode + self.fixed_decode, dealt * self.prompts + self.fixed_prompts
        begun = dealt * self.begun
        return StageSteps(decode, prompts, self.send, self.send_prompts, self.latency, self.varies, begun)


def _steps(stages: Stages, ways: Sequence[Way], columns: int) -> tuple[_Steps, Floats]:
    """And the most layers that each stage holds, as a fraction."""
    count = len(ways[0].order)
    values = np.zeros((10, count, len(ways), columns))
    for number, (kinds, order) in enumerate(ways):
        for place, (kind, group) in enumerate(zip(kinds, order, strict=True)):
            last = place == count - 1
            values[:6, place, number] = stages.table(kind, group, count, first=place == 0, head=last).values
            if count > 1:
                values[6:9, place, number] = stages.hop(group, order[(place + 1) % count], count, back=last)
            values[9, place, number] = group.step_variation
    flat = values.reshape(len(values), count, -1)
    return _Steps(flat[1:]), flat[0]


def _most_requests(at: _Steps, load: Load, most: Floats, layers: int) -> Floats:
    """A second, that no deal of layers passes.

    A round of c micro-batches takes no less than c times any stage's step, x_j layers of it d_j seconds and f_j beside, with what prompts add to its share
    of steps: C >= x_j w_j + F_j, where w_j = c d_j + k p_j and k is the prompts that come in a round. As the x_j add up to L, C >= (L + sum F_j / w_j) / sum 1 /
    w_j. Steps that all carry prompts bound likewise how many come. And no token comes before the last is through all stages.
    """

    def slowest(of_a_layer: Floats, beside: Floats) -> Floats:
        """Seconds of the slowest stage, at the least."""
        speed = 1 / of_a_layer
        seconds: Floats = (layers + (beside * speed).sum(axis=0)) / speed.sum(axis=0)
        return seconds

    prompts = (load.in_flight - 1) * load.prompt_steps / load.output_tokens
    a_round = slowest(
        load.micro_batches * at.decode + prompts * at.prompts,
        load.micro_batches * at.fixed_decode + prompts * at.fixed_prompts,
    )
    dealt = cheapest_first(at.decode, most, layers)
    through = (dealt * at.decode + at.fixed_decode + at.send + at.latency).sum(axis=0)
    carrying = load.prompt_steps * slowest(at.decode + at.prompts, at.fixed_decode + at.fixed_prompts)
    rounds = max(1, load.output_tokens - 1)
    requests: Floats = np.minimum(load.in_flight / (rounds * np.maximum(a_round, through)), 1 / carrying)
    return requests


def _best(found: Sequence[Estimate], rungs: int) -> Estimate:
    """Of each rung, of equals the first of all ways."""
    rates, seconds, penalties = np.zeros(rungs), np.full(rungs, np.inf), np.zeros(rungs)
    places, splits = np.full(rungs, -1), list[Split | None]([None] * rungs)
    for each in found:
        is_first = (each.rates == rates) & (each.places < places)
        for rung in np.flatnonzero((each.rates > rates) | (is_first & (each.rates > 0))):
            rates[rung], seconds[rung], penalties[rung] = each.rates[rung], each.seconds[rung], each.penalties[rung]
            places[rung], splits[rung] = each.places[rung], each.splits[rung]
    return Estimate(rates, seconds, penalties, places, tuple(splits))
