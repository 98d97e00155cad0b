"""A replanning as people read it. Called by `strata plan --running`."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strata_planner.replan.decision import Replanned
from strata_planner.replan.holdings import Movement, Place
from strata_planner.replan.steps import Drop, Load, Narrow, Step, Switch
from strata_planner.search.metric import gain
from strata_planner.units import human_bytes


def render_replan(outcome: Replanned) -> RenderableType:
    """The decision, what it moves beside what planning anew would, and the steps in order."""
    verb = "keep the running plan" if outcome.kept else "change the plan"
    lines = [f"{verb}: {outcome.reason}"]
    if not outcome.kept:
        below = max(0.0, -gain(outcome.value, outcome.scratch_value))
        lines += [
            f"reads {_moved(outcome.movement)}; planning anew would read {_moved(outcome.scratch_movement)}",
            f"{below:.2%} below the best plan",
        ]
    parts: list[RenderableType] = [*map(Text, lines)]
    return Group(*parts, steps_table(outcome.steps)) if outcome.steps else Group(*parts)


def _moved(moved: Movement) -> str:
    return f"{human_bytes(moved.loaded_bytes)} ({moved.moved_layers} layers change their device)"


def steps_table(steps: tuple[Step, ...]) -> Table:
    """Consecutive steps of one kind on one device in a row."""
    table = Table(title="steps", title_justify="left")
    for column in ("device", "step", "layers"):
        table.add_column(column)
    table.add_column("bytes read", justify="right")
    table.add_column("serving")
    for place, kind, group in _grouped(steps):
        loads = [each for each in group if isinstance(each, Load)]
        pauses = any(getattr(each, "pauses", False) for each in group)
        size = human_bytes(sum(each.size_bytes for each in loads)) if loads else ""
        table.add_row(_device(place), kind, _layers(group), size, "pauses" if pauses else "")
    return table


def _grouped(steps: tuple[Step, ...]) -> list[tuple[Place, str, list[Step]]]:
    rows: list[tuple[Place, str, list[Step]]] = []
    for step in steps:
        place: Place = () if isinstance(step, Switch) else step.place
        kind = _kind(step)
        if rows and rows[-1][:2] == (place, kind):
            rows[-1][2].append(step)
        else:
            rows.append((place, kind, [step]))
    return rows


def _kind(step: Step) -> str:
    match step:
        case Drop():
            return "drop"
        case Narrow(to=to):
            return f"quantize to {to} in place"
        case Load(layer=None):
            return "load embedding or head"
        case Load(to=to):
            return f"load {to}"
        case Switch():
            return "switch"


def _device(place: Place) -> str:
    return ", ".join(f"{node} {kind} #{index}" for node, kind, index in place) or "all"


def _layers(steps: list[Step]) -> str:
    """Layers as ranges: 0-3, 7."""
    found: list[int] = []
    for step in steps:
        if isinstance(step, Drop):
            found += step.layers
        elif isinstance(step, Narrow) or (isinstance(step, Load) and step.layer is not None):
            found.append(step.layer if step.layer is not None else -1)
    ranges: list[list[int]] = []
    for layer in sorted(found):
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
