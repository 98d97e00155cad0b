"""How devices get from what they hold to what a plan gives them: ordered steps, each within every device's memory.

Called by `decision`; tests replay the steps. While the running plan can serve, devices load beside what they run and free the
rest after the switch; a device without room for both frees first, and the steps say that serving pauses there.
"""

from dataclasses import dataclass

from strata_planner.contract.formats import FormatName
from strata_planner.contract.plan import Plan, Stage
from strata_planner.costs.memory import embedding_bytes, layer_weights_bytes
from strata_planner.costs.shards import portion_of, portions
from strata_planner.errors import PlannerError
from strata_planner.question.model import Model
from strata_planner.replan.holdings import (
    NOTHING,
    Held,
    Place,
    held_at,
    held_by,
    holdings,
    is_narrowing,
    missing_layers,
    new_tables,
)


@dataclass(frozen=True)
class Drop:
    """Free layers, and the tables that the new plan does not want here where `tables` says so."""

    place: Place
    layers: tuple[int, ...]
    tables: bool
    pauses: bool  # the running plan uses them still: it cannot serve from here on


@dataclass(frozen=True)
class Narrow:
    """Quantize a layer where it lies: the finer bits are dropped, nothing is read."""

    place: Place
    layer: int
    to: FormatName
    pauses: bool


@dataclass(frozen=True)
class Load:
    """Read a layer from the checkpoint at a format, or (`layer` None) the tables of the stage."""

    place: Place
    layer: int | None
    to: FormatName
    size_bytes: int


@dataclass(frozen=True)
class Switch:
    """The new plan serves from here on."""


Step = Drop | Narrow | Load | Switch


class Ledger:
    """Bytes on one device of a place, of unlike ones the fullest: weights and tables as they come and go, KV and temporaries of the plan that runs."""

    def __init__(self, model: Model, plan: Plan, stage: Stage) -> None:
        self._model, self._compute_type, self._speculation = model, plan.compute_type, plan.speculation
        memory, device = stage.fullest
        rank = stage.memories.index(memory)
        self._portion = portions(stage.tensor_parallel, stage.shares)[rank]
        self.usable_bytes = device.usable_bytes

    def layer_bytes(self, layer: int, name: FormatName) -> int:
        shape = portion_of(self._model.layers[layer], self._portion)
        return layer_weights_bytes(shape, name, self._compute_type, self._speculation)

    def table_bytes(self, tables: tuple[bool, bool]) -> int:
        size = embedding_bytes(self._model, embedding=tables[0], head=tables[1], compute_type=self._compute_type)
        return self._portion.rows(self._model.vocab_size, size)

    def bytes(self, held: Held) -> int:
        return self.table_bytes(held.tables) + sum(self.layer_bytes(*each) for each in held.layers.items())


def steps(running: Plan | None, plan: Plan, model: Model, *, serving: bool) -> tuple[Step, ...]:
    """From `running` (None: nothing is held) to `plan`. `serving`: the running plan still has all its devices.

    Raises PlannerError if a device could not hold its own stage of the plan (which the plan's law excludes).
    """
    before = holdings(running) if running else {}
    working = {stage.places: _working_bytes(stage) for stage in running.stages} if running and serving else {}
    early: list[Step] = []
    late: list[Step] = []
    for stage in plan.stages:
        place = stage.places
        held = held_at(before, place, stage.shares)
        if place in before and held is NOTHING:  # parts of other shares
            early.append(Drop(place, tuple(before[place].layers), tables=True, pauses=place in working))
        mover = _Mover(place, Ledger(model, plan, stage), held, held_by(stage))
        first, after = mover.steps(stage, working.get(place) if held is not NOTHING else None)
        early += first
        late += after
    gone = set(before) - {stage.places for stage in plan.stages}
    if serving:
        late += [Drop(place, tuple(before[place].layers), tables=True, pauses=False) for place in sorted(gone)]
    return (*early, Switch(), *late)


def _working_bytes(stage: Stage) -> int:
    """KV and temporaries of a stage that serves, and the small model that drafts: it comes and goes with them."""
    memory, _ = stage.fullest
    return memory.kv_bytes + memory.temporary_bytes + memory.draft_bytes


@dataclass(frozen=True)
class _Mover:
    place: Place
    ledger: Ledger
    held: Held
    wanted: Held

    def steps(self, stage: Stage, working_bytes: int | None) -> tuple[list[Step], list[Step]]:
        """Before and after the switch. `working_bytes`: of the plan that serves meanwhile, None if it does not."""
        loads = self._loads()
        beside = sum(load.size_bytes for load in loads)
        if working_bytes is not None:
            room = self.ledger.usable_bytes - self.ledger.bytes(self.held) - working_bytes
            if beside + _working_bytes(stage) <= room:
                return list(loads), [*self._drops(pauses=False), *self._narrows(pauses=False)]
        pauses = working_bytes is not None
        early = [*self._drops(pauses=pauses), *self._narrows(pauses=pauses)]
        if self.ledger.bytes(self.wanted) + _working_bytes(stage) > self.ledger.usable_bytes:
            raise PlannerError(f"stage {stage.stage} of the plan does not fit {self.place}")
        return [*early, *loads], []

    def _drops(self, *, pauses: bool) -> list[Step]:
        narrowed = self._narrowed
        useless = tuple(
            layer
            for layer, name in self.held.layers.items()
            if self.wanted.layers.get(layer) != name and layer not in narrowed
        )
        tables = any(new_tables(self.wanted, self.held))  # held and no longer wanted
        return [Drop(self.place, useless, tables, pauses)] if useless or tables else []

    @property
    def _narrowed(self) -> dict[int, FormatName]:
        """Layers that are quantized where they lie, and to what."""
        held = self.held.layers
        return {
            layer: name
            for layer, name in self.wanted.layers.items()
            if layer in held and is_narrowing(held[layer], name)
        }

    def _narrows(self, *, pauses: bool) -> list[Narrow]:
        return [Narrow(self.place, layer, name, pauses) for layer, name in self._narrowed.items()]

    def _loads(self) -> list[Load]:
        missing = [
            Load(self.place, layer, name, self.ledger.layer_bytes(layer, name))
            for layer, name in missing_layers(self.held, self.wanted).items()
        ]
        size = self.ledger.table_bytes(new_tables(self.held, self.wanted))
        return [*([Load(self.place, None, "dense", size)] if size else []), *missing]
