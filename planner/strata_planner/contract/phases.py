"""Phases of a start: how a process says in its log how long each of its own took, and how whoever reads that log finds them.

Written by the launcher, slots and gateways, read by `strata up --verbose`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
