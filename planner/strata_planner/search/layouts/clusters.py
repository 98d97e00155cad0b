"""Nodes grouped by how quickly they reach each other: k-means over the communication matrix, the number of groups by its elbow.

The genetic search starts here (HexGen, ICML 2024, section 4.2). Pure; deterministic by its seed.
"""

import random

import numpy as np

from strata_planner.search.layouts.pool import Pool
from strata_planner.search.layouts.stages import Floats

_ELBOW = 0.05  # of the spread: one more group that takes less of it is not worth having
_ROUNDS = 20


def delays(pool: Pool) -> Floats:
    """[nodes, nodes] logarithms of the seconds that a megabyte takes, from row to column; a node is as near to itself as its nearest
    neighbour is.
    """
    names = pool.nodes
    found = np.zeros((len(names), len(names)))
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if i != j:
                link = pool.link(a, b)
                found[i, j] = np.log1p(1e3 * (link.latency_seconds + 1e6 / link.bytes_per_second))
    for i, row in enumerate(found):
        found[i, i] = min((value for j, value in enumerate(row) if j != i), default=0.0)
    return found


def grouped(pool: Pool, seed: int) -> list[list[str]]:
    """Names of the nodes of each group."""
    points = delays(pool)
    if (points != points.T).any():  # links differ by direction: alike are nodes whose ways there and back are
        points = np.hstack([points, points.T])
    spread = float(((points - points.mean(axis=0)) ** 2).sum())
    best, inertia = kmeans(points, 1, seed)
    for count in range(2, len(points) + 1):
        labels, less = kmeans(points, count, seed)
        if inertia - less <= _ELBOW * spread:
            break
        best, inertia = labels, less
    return [[name for name, label in zip(pool.nodes, best, strict=True) if label == each] for each in sorted(set(best))]


def kmeans(points: Floats, count: int, seed: int) -> tuple[list[int], float]:
    """Lloyd's method from far-apart points (k-means++): a label per row, the sum of squared distances."""
    draw = random.Random(seed)
    centres = points[[draw.randrange(len(points))]]
    while len(centres) < count:
        distance = _squares(points, centres).min(axis=1)
        if not distance.any():
            break
        centres = np.vstack([centres, points[draw.choices(range(len(points)), weights=distance.tolist())[0]]])
    labels = _squares(points, centres).argmin(axis=1)
    for _ in range(_ROUNDS):
        centres = np.array([points[labels == each].mean(axis=0) for each in sorted(set(labels.tolist()))])
        new = _squares(points, centres).argmin(axis=1)
        if (new == labels).all():
            break
        labels = new
    return labels.tolist(), float(_squares(points, centres).min(axis=1).sum())


def _squares(points: Floats, centres: Floats) -> Floats:
    """[points, centres]."""
    found: Floats = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2)
    return found
