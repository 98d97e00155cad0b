"""Which processors of a machine a device is: those that lie beside one memory (a NUMA node), where the machine has several.

Read from the kernel's files by who divides this machine into devices (`strata up`) and by slots, which compute there. Elsewhere than on Linux, and on
machines of one memory, nobody is bound to any.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

NODES = Path("/sys/devices/system/node")

Processors = frozenset[int]
Result = TypeVar("Result")
ANYWHERE: Processors = frozenset()


def usable_processors() -> Processors:
    """That this thread, and so this process, may run on."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ANYWHERE


def cores() -> int:
    """How many processors this process may use."""
    return len(usable_processors()) or os.cpu_count() or 1


def memories(nodes: Path = NODES, usable: Collection[int] | None = None) -> tuple[Processors, ...]:
    """The usable processors beside each memory, in the kernel's order; a memory without any is left out. Empty where the kernel tells nothing."""
    allowed = usable_processors() if usable is None else frozenset(usable)
    listed = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    beside = (listed_processors(file.read_text(encoding="ascii")) & allowed for file in listed)
    return tuple(each for each in beside if each)


def listed_processors(text: str) -> Processors:
    """Of a list as the kernel writes it: `0-3,8-11`. Raises ValueError for another."""
    parts = [part for part in text.strip().split(",") if part]
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in parts]
    if None in ranges:
        raise ValueError(f"'{text.strip()}' is no list of processors, as in 0-3,8-11")
    bounds = [(int(each[1]), int(each[2] or each[1])) for each in ranges if each]
    return frozenset(number for first, last in bounds for number in range(first, last + 1))


def processors_of(device: int, devices: int, beside: Sequence[Processors]) -> Processors:
    """Where the device of this number computes, of so many that the machine is divided into evenly; `beside`: each memory. ANYWHERE, where that is no part of it:
    one memory, one device, or devices that would lie across memories.
    """
    if len(beside) == 1 or devices == 1 or not beside:
        return ANYWHERE
    place = device % devices
    if devices % len(beside) == 0:
        return beside[place // (devices // len(beside))]
    if len(beside) % devices == 0:
        memories_each = len(beside) // devices
        return ANYWHERE.union(*beside[place * memories_each : (place + 1) * memories_each])
    return ANYWHERE


@dataclass(frozen=True, slots=True)
class Division:
    """How the machine of a slot is divided into devices: so many, of which the node's first has this number. A slot that is told nothing has them all."""

    first: int = 0
    devices: int = 1

    def processors(self, device: int, beside: Sequence[Processors]) -> Processors:
        """Of the node's device of this index."""
        return processors_of(self.first + device, self.devices, beside)


UNDIVIDED = Division()


def bind(processors: Processors) -> None:
    """This thread, and those that it starts from now on, run there alone. Memory that they touch first lies beside them."""
    if processors:
        os.sched_setaffinity(0, processors)


def bound(processors: Processors, body: Callable[[], Result]) -> Result:
    """What `body` gives, in a thread of its own where it is bound: so are the threads that libraries start for it. Raises what it raises."""
    if not processors:
        return body()
    with ThreadPoolExecutor(1, initializer=bind, initargs=(processors,)) as thread:
        return thread.submit(body).result()
