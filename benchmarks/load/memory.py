"""Memory of a deployment's processes over time, and its trend, where some of them are killed on the way."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.deployment import Deployment

YOUNG_SECONDS = 30.0  # of each process: it loads, and its first full batches allocate
_FEWEST = 30  # samples of one process that make a line

Samples = Sequence[tuple[float, int]]  # seconds, bytes


@dataclass
class Memory:
    """Private bytes of each process, sampled. A killed slot's successor is a process of its own under the same name."""

    deployment: Deployment
    samples: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _processes: Mapping[str, psutil.Process] = field(default_factory=dict)

    def sample(self) -> None:
        """One look at all that run now."""
        if not self._processes or not all(process.is_running() for process in self._processes.values()):
            self._processes = self.deployment.processes()
        now = time.monotonic() - self._started
        for name, process in self._processes.items():
            try:
                memory = process.memory_info()
            except psutil.Error:
                continue
            self.samples.setdefault((name, process.pid), []).append((now, memory.rss - memory.shared))

    def trends(self, warm_up_seconds: float) -> dict[str, float]:
        """Bytes a minute by name: one slope through all processes of that name, each from a height of its own."""
        lives: dict[str, list[Samples]] = {}
        for (name, _), samples in self.samples.items():
            grown_up = max(warm_up_seconds, samples[0][0] + YOUNG_SECONDS)
            lives.setdefault(name, []).append([sample for sample in samples if sample[0] >= grown_up])
        slopes = {name: slope(each) for name, each in lives.items()}
        return {name: found * 60 for name, found in slopes.items() if found is not None}


def slope(lives: Sequence[Samples]) -> float | None:
    """Least squares of one slope common to several lines, each with its own intercept; None for too few samples."""
    above = below = 0.0
    for samples in lives:
        if len(samples) < _FEWEST:
            continue
        middle = sum(when for when, _ in samples) / len(samples)
        mean = sum(size for _, size in samples) / len(samples)
        above += sum((when - middle) * (size - mean) for when, size in samples)
        below += sum((when - middle) ** 2 for when, _ in samples)
    return above / below if below else None
