"""Many pipelines at once: a lattice whose paths are the device orders of a pool, each stage a step to the next level.

Built here from one candidate (a single path) or by `pools` from devices whose order is open; read by `relaxation`, `columns`
and `thresholds`. Only for units that cost alike everywhere and differ in sensitivity alone: all layers of a dense model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from strata_planner.search.exact.problem import Problem, StageCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NEVER = 1e12  # seconds of a unit at bits that the device lacks


@dataclass(frozen=True)
class Level:
    """Steps that place one stage, sorted by `target`; states of a level are numbered from 0.

    `hop_sum`, `hop_max` [steps, 2]: what hops add to the sum of a phase, and the slowest of them.
    """

    source: Ints
    target: Ints
    kind: Ints
    hop_sum: Floats
    hop_max: Floats

    @cached_property
    def starts(self) -> Ints:
        """Where the steps to each target begin."""
        return np.flatnonzero(np.diff(self.target, prepend=-1))


@dataclass(frozen=True)
class Lattice:
    """`kinds`: unlike stages (device class, first or not, last or not). Every path has `members[g]` stages whose kind is of
    group g. `penalty` [units, bits]: theta x omega. `units[u]` = the run of unit u.
    """

    bits: tuple[int, ...]
    penalty: Floats
    kinds: tuple[StageCosts, ...]
    group: Ints
    members: Ints
    levels: tuple[Level, ...]
    weights: tuple[float, float, float]  # slowest prefill, slowest decode, sum of decode

    @property
    def units(self) -> int:
        return len(self.penalty)

    @cached_property
    def seconds(self) -> Floats:
        """[kinds, bits, phase] of a unit."""
        never = (NEVER, NEVER)
        return np.array([[kind.seconds[0].get(bits, never) for bits in self.bits] for kind in self.kinds])

    @cached_property
    def fixed(self) -> Floats:
        """[kinds, phase]."""
        return np.array([kind.fixed_seconds for kind in self.kinds])

    @cached_property
    def bytes(self) -> Floats:
        """[kinds, bits] of a unit while serving."""
        return np.array([[kind.bytes[0][bits] for bits in self.bits] for kind in self.kinds], dtype=np.float64)

    @cached_property
    def capacity(self) -> Floats:
        return np.array([kind.capacity_bytes for kind in self.kinds], dtype=np.float64)


def alike(problem: Problem) -> bool:
    """Whether units differ in sensitivity alone: what all of this rests on."""
    return all(
        len({tuple(sorted(each.items())) for each in table}) == 1
        for stage in problem.stages
        for table in (stage.seconds, stage.bytes, stage.weight_bytes)
    )


def penalties(problem: Problem, bits: Sequence[int]) -> Floats:
    """[units, bits]: theta x omega, the units of all runs one after the other."""
    rows = [[problem.theta * run.omega[each] for each in bits] for run in problem.runs for _ in range(run.units)]
    return np.array(rows)


def unit_runs(problem: Problem) -> list[int]:
    """The run of each unit."""
    return [r for r, run in enumerate(problem.runs) for _ in range(run.units)]


def lattice_of(problem: Problem) -> Lattice:
    """Of one candidate; its units must be alike."""
    bits = tuple(sorted(problem.runs[0].omega))
    places = len(problem.stages)
    zero = np.zeros(1, dtype=np.int64)
    hops = [np.array([stage.transfer_seconds]) for stage in problem.stages]
    return Lattice(
        bits=bits,
        penalty=penalties(problem, bits),
        kinds=problem.stages,
        group=np.arange(places),
        members=np.ones(places, dtype=np.int64),
        levels=tuple(Level(zero, zero, zero + j, hop, hop) for j, hop in enumerate(hops)),
        weights=(problem.slowest_prefill, problem.slowest_decode, problem.sum_decode),
    )
