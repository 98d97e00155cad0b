"""What slots keep of layers that they would take over, within the host memory that there is: which of several losses' reads, and which of them a
repaired plan has still a use for.

Called by `shadows`, which works them out, and by `repair`, which has no time for that.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata_planner.contract.devices import is_processor
from strata_planner.contract.formats import ANY_PRECISION, BITS_OF_FORMAT, STORED_FORMATS, FormatName
from strata_planner.contract.plan import Plan, Stage
from strata_planner.contract.shadows import Shadow
from strata_planner.costs.memory import layer_weights_bytes
from strata_planner.question.model import Model
from strata_planner.replan.steps import Load, Narrow, Step

_PLANES = frozenset(ANY_PRECISION.values())
_AS_STORED = frozenset({*_PLANES, "any4_a8", *STORED_FORMATS})  # read in as many bits as they are run in
EMBEDDING, HEAD = -1, -2  # in the place of a layer's number
Tables = tuple[bool, bool]  # embedding, head


@dataclass(frozen=True)
class Read:
    """What a slot would read of one layer, or of a table, after a loss."""

    layer: int
    format: FormatName
    size_bytes: int


def reads_for(model: Model, plan: Plan, layers: Mapping[int, FormatName], tables: Tables) -> tuple[Read, ...]:
    """Tables first. What no checkpoint or copy holds as it is run is read in 16 bits and rounded."""
    table = 2 * model.table
    head = 0 if all(tables) and model.tied and plan.head_format == "dense" else table
    found = list[Read]()
    if tables[0]:
        found.append(Read(EMBEDDING, "dense", table + 2 * model.embedding_other))
    if tables[1]:
        found.append(Read(HEAD, "dense", head + 2 * model.head_other))
    for layer, name in layers.items():
        shape = model.layers[layer]
        stored = name in _AS_STORED
        size = layer_weights_bytes(shape, name if stored else "dense", plan.compute_type if stored else "bfloat16")
        found.append(Read(layer, name, size))
    return tuple(found)


def rooms_of(plan: Plan, most: Mapping[str, int]) -> dict[str, int]:
    """Bytes of host memory that each slot may keep shadows in: what `most` gives it, and of a processor's memory what its stages leave."""
    left: dict[str, int] = {}
    for stage in plan.stages:
        if is_processor(stage.devices[0].type):
            free = sum(device.usable_bytes - stage.memory.total_bytes for device in stage.devices)
            left[stage.slot] = left.get(stage.slot, 0) + max(0, free)
    slots = {stage.slot for stage in plan.stages}
    return {slot: min(room, left.get(slot, room)) for slot, room in most.items() if slot in slots}


def chosen(reads: Mapping[str, Sequence[Read]], room: int) -> set[Read]:
    """What is kept of one slot's reads, given by the node that is lost: always of that loss which leaves most to be read, as long as something fits. What
    several losses have in common is kept, and counted, once.
    """
    kept = set[Read]()
    waiting = {node: list(listed) for node, listed in reads.items()}
    left = {node: sum(each.size_bytes for each in listed) for node, listed in reads.items()}
    while any(waiting.values()):
        node = min((node for node in waiting if waiting[node]), key=lambda each: (-left[each], each))
        read = waiting[node].pop(0)
        if read not in kept and read.size_bytes <= room:
            room -= read.size_bytes
            kept.add(read)
            for other, listed in reads.items():
                left[other] -= read.size_bytes * (read in listed)
    return kept


def shadows_of(plan: Plan, slot: str, reads: Mapping[str, Sequence[Read]], room: int) -> Iterator[Shadow]:
    """What a slot keeps of its `reads`, by the node that is lost: of its own node's loss nothing, as it goes with it."""
    node = next(stage.node for stage in plan.stages if stage.slot == slot)
    others = {against: tuple(listed) for against, listed in reads.items() if against != node}
    kept = chosen(others, room)
    for against, listed in sorted(others.items()):
        mine = [each for each in listed if each in kept]
        layers = sorted((each for each in mine if each.layer >= 0), key=lambda each: each.layer)
        if mine:
            yield Shadow(
                slot=slot,
                node=node,
                against=against,
                layers=tuple(each.layer for each in layers),
                format=tuple(each.format for each in layers),
                layer_bytes=tuple(each.size_bytes for each in layers),
                read_bytes=sum(each.size_bytes for each in listed),
                room_bytes=room,
                embedding_bytes=sum(each.size_bytes for each in mine if each.layer == EMBEDDING),
                head_bytes=sum(each.size_bytes for each in mine if each.layer == HEAD),
            )


def still_kept(running: Plan, plan: Plan, model: Model) -> tuple[Shadow, ...]:
    """Of the shadows of a plan, those that the one which follows it has a use for: against nodes that it has still, of layers that their slots have not taken."""
    nodes = {stage.node for stage in plan.stages}
    rooms = rooms_of(plan, {each.slot: each.room_bytes for each in running.shadows})
    found = list[Shadow]()
    for slot, room in sorted(rooms.items()):
        own = [stage for stage in plan.stages if stage.slot == slot]
        reads = {
            each.against: _without(each, own, model, plan)
            for each in running.shadows
            if each.slot == slot and each.against in nodes
        }
        found += shadows_of(plan, slot, reads, room)
    return tuple(found)


def _without(shadow: Shadow, own: Iterable[Stage], model: Model, plan: Plan) -> tuple[Read, ...]:
    """What a shadow has of layers and tables that its slot does not run itself."""
    own = list(own)
    has = {layer for stage in own for layer in range(stage.layers[0], stage.layers[1] + 1)}
    tables = (
        shadow.embedding and not any(stage.embedding for stage in own),
        shadow.head and not any(stage.head for stage in own),
    )
    return reads_for(model, plan, {layer: name for layer, name in shadow.parts.items() if layer not in has}, tables)


def shadowed_bytes(plan: Plan, steps: Iterable[Step]) -> int:
    """Of what the steps load, as it lies on devices, that which slots of the plan keep."""
    slots = {stage.places: stage.slot for stage in plan.stages}
    return sum(
        step.size_bytes
        for step in steps
        if isinstance(step, Load) and is_kept(plan.shadows, slots.get(step.place, ""), step)
    )


@dataclass(frozen=True)
class Busiest:
    """What steps ask of slots that work side by side, each figure of the slot that has most of it: bytes read from files, bytes brought to the device
    from wherever they lie, layers narrowed in place.
    """

    read_bytes: int = 0
    loaded_bytes: int = 0
    narrowed_layers: int = 0


NOTHING_TO_DO = Busiest()


def busiest(plan: Plan, steps: Iterable[Step]) -> Busiest:
    """`plan`: the one before, whose slots keep what its shadows say."""
    slots = {stage.places: stage.slot for stage in plan.stages}
    reads, loads, narrows = Counter[object](), Counter[object](), Counter[object]()
    for step in steps:
        if isinstance(step, Load):
            loads[step.place] += step.size_bytes
            reads[step.place] += step.size_bytes * (not is_kept(plan.shadows, slots.get(step.place, ""), step))
        elif isinstance(step, Narrow):
            narrows[step.place] += 1
    return Busiest(*(max(each.values(), default=0) for each in (reads, loads, narrows)))


def is_kept(shadows: Iterable[Shadow], slot: str, load: Load) -> bool:
    """Whether a slot keeps what it is to load: a layer at these bits, or bit-planes at more."""
    mine = [each for each in shadows if each.slot == slot]
    if load.layer is None:
        return any(each.embedding or each.head for each in mine)
    return any(_gives(each.parts.get(load.layer), load.to) for each in mine)


def _gives(kept: FormatName | None, wanted: FormatName) -> bool:
    if kept in _PLANES and wanted in _PLANES:
        return BITS_OF_FORMAT[kept] >= BITS_OF_FORMAT[wanted]
    return kept == wanted
