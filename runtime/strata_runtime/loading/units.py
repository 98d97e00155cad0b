"""What a load reads and stores at once: the units of a layer, in order.

Made for `load_stage` from the names in the checkpoint. Knows no tensors.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from strata_planner.contract.architectures import ROUTING
from strata_planner.contract.formats import STORED_FORMATS, FormatName
from strata_runtime.errors import InputError
from strata_runtime.loading.checkpoint import Checkpoint, TensorPlace
from strata_runtime.loading.quantized import format_in
from strata_runtime.model.adapter import ModelSlice
from strata_runtime.model.expert_parts import ExpertPart


@dataclass(frozen=True)
class Unit:
    """A linear, `tensors` being `weight` and perhaps `bias` -> name in the checkpoint; or, without a key, all else that a layer has,
    each name for itself.
    """

    layer: int
    key: str | None
    tensors: dict[str, str]
    format: FormatName
    ends_layer: bool = False


@dataclass(frozen=True)
class ExpertUnit:
    """A quantized matrix of one expert, `expert` among those of this stage. `key`: path of the fused parameter [experts, N, K] that it is a part of; `rows`: the matrices that lie one below the
    other in it: gate and up as one where they are rounded here, part by part as a checkpoint stores them (part `part` of `parts`).
    """

    layer: int
    key: str
    expert: int
    fused_shape: tuple[int, int, int]
    rows: tuple[TensorPlace, ...]
    format: FormatName
    part: int = 0
    parts: int = 1
    ends_layer: bool = False


AnyUnit = Unit | ExpertUnit


def units_of(
    stage: ModelSlice, checkpoint: Checkpoint, layer: int, name: FormatName, keys: Iterable[str]
) -> list[AnyUnit]:
    """A layer's linears each for itself, before them all that is no linear's or is converted first, after them its experts where they are quantized.

    `name`: the format of the layer. Raises InputError where experts are incomplete, or quantized in part.
    """
    linears: dict[str, dict[str, str]] = defaultdict(dict)
    experts: dict[str, ExpertPart] = {}
    others: dict[str, str] = {}
    for key in keys:
        linear, _, what = (stage.plain_parameter(key) or "").rpartition(".")
        part = stage.expert_part(key)
        if linear in stage.places(layer):
            linears[linear][what] = key
        elif part is not None and _format_of_expert(checkpoint, key, name) != "dense":
            experts[key] = part
        else:
            others[key] = key
    for incomplete in [linear for linear, tensors in linears.items() if "weight" not in tensors]:
        others |= {key: key for key in linears.pop(incomplete).values()}
    units: list[AnyUnit] = [Unit(layer, None, others, format_in(checkpoint, None, name))] if others else []
    for linear, tensors in linears.items():
        own = "dense" if linear.endswith(ROUTING) else format_in(checkpoint, tensors["weight"], name)
        units.append(Unit(layer, linear, tensors, own))
    if experts:
        _check_none_is_dense(stage, layer, others)
        units += _expert_units(stage, layer, name, experts)
    return [*units[:-1], replace(units[-1], ends_layer=True)]


def _format_of_expert(checkpoint: Checkpoint, key: str, name: FormatName) -> FormatName:
    """Gptq's act-order gives each expert an order of inputs of its own: such experts are read to the compute type."""
    own = format_in(checkpoint, key, name)
    return "dense" if own.startswith("gptq") else own


def _check_none_is_dense(stage: ModelSlice, layer: int, others: Iterable[str]) -> None:
    for key in others:
        if stage.expert_part(key) is not None:
            raise InputError(
                f"{key} is not quantized in the checkpoint, and other experts of layer {layer} are: give the layer 16 bits"
            )


def _expert_units(
    stage: ModelSlice, layer: int, name: FormatName, experts: dict[str, ExpertPart]
) -> Iterator[ExpertUnit]:
    found: dict[str, dict[int, dict[int, TensorPlace]]] = defaultdict(lambda: defaultdict(dict))
    for checkpoint_key, part in experts.items():
        if part.expert is None:
            for expert in range(stage.fused_shape(layer, part.key)[0]):
                place = TensorPlace(checkpoint_key, stage.first_expert(part.key) + expert)
                found[part.key][expert][part.part] = place
        else:
            found[part.key][part.expert][part.part] = TensorPlace(checkpoint_key)
    for key, of_expert in found.items():
        parts = range(max(len(rows) for rows in of_expert.values()))
        shape = stage.fused_shape(layer, key)
        for expert in range(shape[0]):
            if sorted(of_expert[expert]) != list(parts):
                raise InputError(
                    f"the checkpoint lacks tensors of expert {expert} of {key}: it is incomplete or belongs to another architecture"
                )
            rows = tuple(of_expert[expert][part] for part in parts)
            whole = ExpertUnit(layer, key, expert, shape, rows, name)
            if name not in STORED_FORMATS:
                yield whole
                continue
            for number, place in enumerate(rows):
                yield replace(whole, rows=(place,), part=number, parts=len(rows))
