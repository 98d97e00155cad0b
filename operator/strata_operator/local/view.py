"""What people see of a local deployment: the plan as a table, the loading of each slot as a bar."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from strata_planner.answer.explain import render_plan
from strata_planner.contract.control import SlotStatus
from strata_planner.contract.plan import Plan, Stage
from strata_planner.contract.roles import roles_of
from strata_planner.search.planning import PlanOutcome

FILE_WIDTH = 140  # of the table where no terminal says how wide it is
_MIB = 1 << 20


def show_plan(outcome: PlanOutcome, console: Console) -> None:
    """Table, prediction, alternatives, and what they rest on."""
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(render_plan(outcome.plan, outcome), highlight=False)


def measured_table(plan: Plan, statuses: dict[str, SlotStatus]) -> Table:
    """A row per stage: how busy it was, and the memory it grew by beside what was predicted."""
    table = Table(title="stages, since their epoch began", title_justify="left")
    for name in ("stage", "slot", "busy", "steps", "memory predicted", "memory measured"):
        table.add_column(name, justify="left" if name == "slot" else "right")
    for replica in plan.replicas:
        for stage in replica.stages:
            table.add_row(*_measured_cells(stage, statuses.get(stage.slot)))
    return table


class LoadingBars:
    """A bar per slot while it loads, on stderr; nothing but the last state where stderr is no terminal."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {
            slot: self._progress.add_task(f"slot {slot}: layers", total=sum(_layers(role.layers) for role in roles))
            for slot, roles in roles_of(plan).items()
        }

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, statuses: dict[str, SlotStatus]) -> None:
        for slot, status in statuses.items():
            if slot in self._tasks:
                self._progress.update(self._tasks[slot], completed=status.prepare.layers_loaded)


def _measured_cells(stage: Stage, status: SlotStatus | None) -> tuple[str, ...]:
    predicted = f"{stage.total_bytes / _MIB:.1f} MiB"
    role = next((role for role in status.roles if role.stage == stage.stage), None) if status else None
    if status is None or role is None:
        return (str(stage.stage), stage.slot, "-", "-", predicted, "-")
    busy = f"{role.busy_seconds / max(role.wall_seconds, 1e-9):.0%}"
    shadows = status.shadow.held_bytes if status.shadow else 0
    grown = f"{(status.private_bytes - status.idle_bytes - shadows) / _MIB:.1f} MiB"
    return (str(stage.stage), stage.slot, busy, str(role.steps), predicted, grown)


def _layers(layers: tuple[int, int]) -> int:
    return layers[1] - layers[0] + 1
