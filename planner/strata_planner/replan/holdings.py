"""What each device holds under a plan, and what another plan would have to bring to it.

Called by `decision` and `steps`. A device is known by its node, type and index: what it holds outlasts the plan that put it
there. Knows no search.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata_planner.contract.formats import ANY_PRECISION, BITS_OF_FORMAT, ComputeType, FormatName
from strata_planner.contract.plan import Plan, Stage
from strata_planner.contract.shares import Shares, lowest
from strata_planner.costs.memory import embedding_bytes, layer_weights_bytes
from strata_planner.costs.shards import Portion, portion_of, portions
from strata_planner.question.model import Model

_PLANES = frozenset(ANY_PRECISION.values())
Place = tuple[tuple[str, str, int], ...]  # node, type and index of each device of a group


@dataclass(frozen=True)
class Held:
    """The weights of one stage on its devices: layer -> format. `tables`: it holds the embedding, the head; `shares`: of each device, where unlike."""

    layers: dict[int, FormatName]
    tables: tuple[bool, bool]
    shares: Shares = ()


def holdings(plan: Plan) -> dict[Place, Held]:
    return {stage.places: held_by(stage) for stage in plan.stages}


def held_by(stage: Stage) -> Held:
    layers = dict(zip(range(stage.layers[0], stage.layers[1] + 1), stage.format, strict=True))
    return Held(layers, (stage.embedding, stage.head), stage.shares)


NOTHING = Held({}, (False, False))


def held_at(before: Mapping[Place, Held], places: Place, shares: Shares) -> Held:
    """What devices hold that is of use where they have these shares: parts of other shares are not."""
    held = before.get(places, NOTHING)
    return held if held.shares == lowest(shares) else NOTHING


def is_narrowing(held: FormatName, wanted: FormatName) -> bool:
    """Whether weights held in one format give the other in place: 16-bit weights are quantized where they lie, bit-planes dropped."""
    if held in _PLANES and wanted in _PLANES:
        return BITS_OF_FORMAT[wanted] < BITS_OF_FORMAT[held]
    return held == "dense" and wanted != "dense"


def is_narrowed(held: FormatName) -> bool:
    """Whether fewer bits can be made of weights in this format where they lie."""
    return held == "dense" or held in _PLANES


def is_there(held: Held, layer: int, wanted: FormatName) -> bool:
    """Whether a device needs nothing from elsewhere to run the layer."""
    have = held.layers.get(layer)
    return have is not None and (have == wanted or is_narrowing(have, wanted))


def missing_layers(held: Held, wanted: Held) -> dict[int, FormatName]:
    """What must be read, with the format it is wanted in."""
    return {layer: name for layer, name in wanted.layers.items() if not is_there(held, layer, name)}


def new_tables(held: Held, wanted: Held) -> tuple[bool, bool]:
    """Whether the embedding and the head must be read."""
    return wanted.tables[0] and not held.tables[0], wanted.tables[1] and not held.tables[1]


@dataclass(frozen=True)
class Movement:
    """What one plan asks for beyond what is held: bytes to read over all devices, and layers that change their owner."""

    loaded_bytes: int = 0
    moved_layers: int = 0

    def __add__(self, other: "Movement") -> "Movement":
        return Movement(self.loaded_bytes + other.loaded_bytes, self.moved_layers + other.moved_layers)


def movement(before: dict[Place, Held], plan: Plan, model: Model) -> Movement:
    """From what devices hold to what the plan gives them. Layers at other bits on the same owner are read anew, not moved."""
    total = Movement()
    for stage in plan.stages:
        held = held_at(before, stage.places, stage.shares)
        parts = portions(stage.tensor_parallel, stage.shares)
        total += movement_to(held, held_by(stage), model, plan.compute_type, parts)
    return total


def movement_to(
    held: Held, wanted: Held, model: Model, compute_type: ComputeType, parts: Sequence[Portion]
) -> Movement:
    """Of one group of devices that hold such parts, bytes of all of them. Embedding and head count where they are new."""
    size = sum(
        count * layer_weights_bytes(portion_of(model.layers[layer], part), name, compute_type)
        for layer, name in missing_layers(held, wanted).items()
        for part, count in Counter(parts).items()
    )
    embedding, head = new_tables(held, wanted)
    size += embedding_bytes(model, embedding=embedding, head=head, compute_type=compute_type)
    return Movement(size, sum(layer not in held.layers for layer in wanted.layers))
