"""Where the time of a start goes: phases one after the other as `strata up` goes through them, and what its processes say of theirs in their logs.

Called by `strata up` and the local deployment; shown by `--verbose`. Knows no process.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from strata_operator.decide.epochs import Ledger, Observed, is_ready, slots_of
from strata_operator.decide.parts import waiting
from strata_planner.contract.phases import Phase, phases_in
from strata_planner.contract.plan import Plan


class Phases:
    """The phase under way and those before it. Entering one ends the one before; what comes again later counts no more."""

    def __init__(self, first: str, age_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """age_seconds: for so long the first has lasted already."""
        self._clock = clock
        self._name, self._since = first, clock() - age_seconds
        self.ended: list[Phase] = []

    def enter(self, name: str) -> None:
        if name in {self._name, *(phase.name for phase in self.ended)}:
            return
        now = self._clock()
        self.ended.append(Phase(self._name, now - self._since))
        self._name, self._since = name, now


READY = "ready"


def phase_of(plan: Plan, ledger: Ledger, seen: Observed, *, forks: bool) -> str:
    """What a deployment that starts is waiting for. `forks`: the launcher has imported what its children share."""
    epoch = ledger.newest
    if not forks:
        return "imports"
    if epoch is None or not slots_of(epoch.plan) <= seen.slots.keys():
        return "processes and warm-up"
    if ledger.committed < epoch.number or waiting(epoch, seen.slots):
        return "reading and packing"
    if any(seen.slots[slot].committed_epoch < epoch.number for slot in slots_of(epoch.plan)):
        return "connecting"
    return READY if is_ready(plan, ledger, seen) else "first route"


def phases_of_processes(logs: Path) -> dict[str, tuple[Phase, ...]]:
    """Name of each process's log -> what it says; of a log that has been added to, what it says last of each phase."""
    told = {}
    for file in sorted(logs.glob("*.log")):
        last = {phase.name: phase for phase in phases_in(file.read_text(errors="replace").splitlines())}
        if last:
            told[file.stem] = tuple(last.values())
    return told


def phases_table(ended: Sequence[Phase], processes: Mapping[str, Sequence[Phase]]) -> Table:
    """Above what followed each other, below what lies within that."""
    table = Table(title="where the start's time went", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for phase in ended:
        table.add_row(phase.name, f"{phase.seconds:.2f}")
    table.add_row("all", f"{sum(phase.seconds for phase in ended):.2f}", end_section=True)
    for name, phases in processes.items():
        for phase in phases:
            table.add_row(f"within {name}: {phase.name}", f"{phase.seconds:.2f}")
    return table
