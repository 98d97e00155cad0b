"""Layers dealt to stages as fractions: evenly in time, or the cheapest stage first. Called by `pipelines` for all loads at once.

Arrays are [stages, loads]: seconds of a layer, seconds that a stage takes beside its layers, the most layers it holds.
"""

import numpy as np

from strata_planner.search.layouts.stages import Floats


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
