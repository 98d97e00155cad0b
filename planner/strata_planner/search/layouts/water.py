"""Layers dealt to stages as fractions: evenly in time, the cheapest stage first, or between the two. Called by `pipelines` for all loads
at once, and by `rounded`.

Arrays are [stages, loads]: seconds of a layer, seconds that a stage takes beside its layers, the most layers it holds.
"""

import numpy as np
import numpy.typing as npt

from strata_planner.search.layouts.stages import Floats

_HALVINGS = 8  # of the span between both ends


def level(seconds: Floats, fixed: Floats, most: Floats, layers: int) -> Floats:
    """Water-filling: the slowest stage is as quick as it can be, every stage has at least one layer where it holds one."""
    full = np.zeros(most.shape, dtype=bool)
    dealt = most
    speed = 1 / seconds
    for _ in range(len(most) + 1):
        open_speed = np.where(full, 0.0, speed)
        left = layers - np.where(full, most, 0.0).sum(axis=0) + (open_speed * fixed).sum(axis=0)
        surface = left / np.maximum(open_speed.sum(axis=0), 1e-300)
        wanted = (surface - fixed) * speed
        dealt = np.where(full, most, wanted)
        over = ~full & (wanted > most)
        if not over.any():
            break
        full |= over
    return np.clip(dealt, np.minimum(1.0, most), most)


def cheapest_first(seconds: Floats, most: Floats, layers: int) -> Floats:
    """A layer to each stage, then as many as it holds to the cheapest, the next, ..."""
    order = np.argsort(seconds, axis=0, kind="stable")
    room = np.take_along_axis(most - 1, order, axis=0)
    before = np.cumsum(room, axis=0) - room
    given = np.clip(layers - len(most) - before, 0.0, room)
    dealt = np.empty_like(given)
    np.put_along_axis(dealt, order, given, axis=0)
    return dealt + 1


def capped(seconds: Floats, fixed: Floats, most: Floats, layers: int, parts: Floats) -> Floats:
    """The cheapest stages first, as far as the slowest takes a `parts`-th of all stages together: with so many micro-batches a round takes
    the larger of `parts` times the slowest and of the sum.
    """
    low = _slowest(level(seconds, fixed, most, layers), seconds, fixed)
    high = np.maximum(low, _slowest(cheapest_first(seconds, most, layers), seconds, fixed))
    for _ in range(_HALVINGS):
        cap = (low + high) / 2
        dealt, fits = _under(cap, seconds, fixed, most, layers)
        higher = ~fits | (parts * cap < (dealt * seconds + fixed).sum(axis=0))
        low, high = np.where(higher, cap, low), np.where(higher, high, cap)
    return _under(high, seconds, fixed, most, layers)[0]


def _under(
    cap: Floats, seconds: Floats, fixed: Floats, most: Floats, layers: int
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The cheapest first with no stage above the cap, and for which loads that holds all layers."""
    room = np.clip((cap - fixed) / seconds, np.minimum(1.0, most), most)
    return cheapest_first(seconds, room, layers), room.sum(axis=0) >= layers * (1 - 1e-9)


def _slowest(dealt: Floats, seconds: Floats, fixed: Floats) -> Floats:
    slowest: Floats = (dealt * seconds + fixed).max(axis=0)
    return slowest
