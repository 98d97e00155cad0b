"""Layers dealt to stages as fractions: evenly in time, the cheapest stage first, or between the two. Called by `ways` for all loads
at once, and by `rounded`.

Arrays are [stages, loads]: seconds of a layer, seconds that a stage takes beside its layers, the most layers it holds.
"""

import numpy as np
import numpy.typing as npt

from strata_planner.search.layouts.stages import Floats

_HALVINGS = 8  # of the span between both ends


def level(seconds: Floats, fixed: Floats, most: Floats, layers: int) -> Floats:
    """Water-filling: the slowest stage is as quick as it can be, every stage has at least one layer where it holds one. All layers are dealt, of no
    fewer than stages, where stages hold so many.
    """
    least, speed = np.minimum(1.0, most), 1 / seconds
    held, at = np.zeros(most.shape, dtype=bool), most
    dealt = most
    for _ in range(len(most) + 1):
        open_speed = np.where(held, 0.0, speed)
        left = layers - np.where(held, at, 0.0).sum(axis=0) + (open_speed * fixed).sum(axis=0)
        wanted = (left / np.maximum(open_speed.sum(axis=0), 1e-300) - fixed) * speed
        dealt = np.where(held, at, np.clip(wanted, least, most))
        # Where too many are dealt the surface sinks yet, and who has the least has it at the end; where too few, who is full.
        too_many = dealt.sum(axis=0) - layers
        low, full = ~held & (wanted < least) & (too_many > 0), ~held & (wanted > most) & (too_many < 0)
        if not (low.any() or full.any()):
            break
        at = np.where(low, least, at)
        held |= low | full
    return dealt


def cheapest_first(seconds: Floats, most: Floats, layers: int) -> Floats:
    """A layer to each stage, then as many as it holds to the cheapest, the next, ..."""
    order = np.argsort(seconds, axis=0, kind="stable")
    return _unsorted(_in_turn(np.take_along_axis(most, order, axis=0), layers), order)


def capped(seconds: Floats, fixed: Floats, most: Floats, layers: int, parts: Floats) -> Floats:
    """The cheapest stages first, as far as the slowest takes a `parts`-th of all stages together: with so many micro-batches a round takes
    the larger of `parts` times the slowest and of the sum.
    """
    order = np.argsort(seconds, axis=0, kind="stable")
    seconds, fixed, most = (np.take_along_axis(each, order, axis=0) for each in (seconds, fixed, most))
    least = np.minimum(1.0, most)
    low = _slowest(level(seconds, fixed, most, layers), seconds, fixed)
    high = np.maximum(low, _slowest(_in_turn(most, layers), seconds, fixed))
    for _ in range(_HALVINGS):
        cap = (low + high) / 2
        room = np.clip((cap - fixed) / seconds, least, most)
        whole = (_in_turn(room, layers) * seconds + fixed).sum(axis=0)
        higher = (room.sum(axis=0) < layers * (1 - 1e-9)) | (parts * cap < whole)
        low, high = np.where(higher, cap, low), np.where(higher, high, cap)
    return _unsorted(_in_turn(np.clip((high - fixed) / seconds, least, most), layers), order)


def _in_turn(room: Floats, layers: int) -> Floats:
    """A layer to each stage, then as many as there is room for to the first, the second, ..."""
    more = room - 1
    given: Floats = np.clip(layers - len(room) - (np.cumsum(more, axis=0) - more), 0.0, more) + 1
    return given


def _unsorted(values: Floats, order: npt.NDArray[np.intp]) -> Floats:
    found = np.empty_like(values)
    np.put_along_axis(found, order, values, axis=0)
    return found


def _slowest(dealt: Floats, seconds: Floats, fixed: Floats) -> Floats:
    slowest: Floats = (dealt * seconds + fixed).max(axis=0)
    return slowest
