"""Phases of a start: how a process says in its log how long each of its own took, and how whoever reads that log finds them.

Written by the launcher, slots and gateways, read by `strata up --verbose`. A process counts its first from its own birth.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"\bphase (?P<name>[^:]+): (?P<seconds>\d+\.\d+) s$")


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    seconds: float

    def __str__(self) -> str:
        return f"phase {self.name}: {self.seconds:.3f} s"


def phases_in(lines: Iterable[str]) -> Iterator[Phase]:
    """Of a log, in its order."""
    for line in lines:
        if found := _LINE.search(line):
            yield Phase(found["name"], float(found["seconds"]))


def age_seconds(stat: Path = Path("/proc/self/stat")) -> float:
    """Since this process was started or forked (proc_pid_stat(5), field 22); 0 where the kernel does not tell."""
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError):  # not Linux
        return 0.0
