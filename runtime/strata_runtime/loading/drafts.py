"""Draft weights of a stage: the first planes of its linears, with a table of their own, to draft tokens with.

`add_drafts` is called when a stage has been loaded, `draft_of` where a layer changes its bits (`precision_switch`). A linear of planes shares its own;
one of 16 bits has planes of the model's any-precision copy, or of what loads keep, which is made here where it is missing.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from strata_planner.contract.draft_weights import has_draft
from strata_planner.contract.formats import ANY_PRECISION, FormatName
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.loading.linear_source import LinearSource
from strata_runtime.loading.load_cache import LoadCache
from strata_runtime.loading.stage_model import StageModel

log = logging.getLogger(__name__)


def check_drafts(role: Role) -> None:
    """Raises InputError for a role whose replica was asked to draft and has nothing coarser to draft with."""
    wish = role.speculation
    if wish.mode == "selfPrecision" and not role.drafts:
        raise InputError(
            f"speculation mode selfPrecision with {wish.draft_bits} bits: no layer of replica {role.replica} has planes of more bits (this stage: "
            f"{', '.join(sorted(set(role.format)))}), so that drafts would take as long as the tokens themselves; plan layers at 16 bits or in "
            f"any-precision formats above {wish.draft_bits} bits, or ask for another mode"
        )


def add_drafts(
    model: StageModel, role: Role, cache: LoadCache | None, progress: Callable[[], None] = lambda: None
) -> None:
    """Give the linears of a loaded stage what they draft with. `cache`: what loads of this node keep, where the model has no copy of its own.

    Raises UnsupportedModelError for a model whose linears have no any-precision form, InputError for a copy that is damaged.
    """
    wish = model.speculation = role.speculation
    drafting = [(layer, name) for layer, name in enumerate(role.format, start=role.layers[0]) if has_draft(name, wish)]
    if drafting:
        model.check_format(ANY_PRECISION[wish.draft_bits])
    with torch.inference_mode():
        for layer, name in drafting:
            linears = model.linears(layer)
            if name == "dense" and all(model.draft(layer, key) for key in linears):
                continue  # taken over
            if cache is not None:
                cache.has(layer)  # a layer that was taken over has not been looked for yet
            made = _made_here(model, layer, cache) if name == "dense" and cache is not None else {}
            for key, linear in linears.items():
                model.set_draft(
                    layer, key, _draft(linear, made[key]) if key in made else draft_of(model, layer, key, linear, name)
                )
            progress()
    if drafting and not model.has_drafts:
        log.warning(
            "layers %d to %d have no copy at %d bits: they draft with their own weights", *role.layers, wish.draft_bits
        )


def _made_here(model: StageModel, layer: int, cache: LoadCache) -> dict[str, PlanesWeight]:
    """Of a layer at 16 bits that no load has kept until now: its linears, made of the checkpoint's weights and kept for the next load."""
    source, bits = model.source, model.speculation.draft_bits
    if source is None or cache.has(layer):
        return {}
    return {
        key: moved(source.part(key, cache.quantized(layer, key, source.whole(key), bits, model.dtype)), model.device)
        for key in source.in_order(model.linears(layer))
    }


def draft_of(
    model: StageModel, layer: int, key: str, linear: nn.Module, name: FormatName, after: PlanesWeight | None = None
) -> AnyLinear | None:
    """What a linear drafts with once it is stored in `name`, its planes being `after`; None: with itself.

    `linear`: as it is now; what it has of the draft weight is shared.
    """
    wish, source = model.speculation, model.source
    if not has_draft(name, wish) or source is None:
        return None
    bits, now = wish.draft_bits, linear.stored if isinstance(linear, AnyLinear) else None
    held = model.draft(layer, key)
    planes = after or now
    if planes is None or planes.bits < bits:
        return (
            _draft(linear, moved(source.planes(key, bits), model.device))
            if _can_read(source, layer, key, bits)
            else None
        )
    if held is not None:
        table = held.stored.table
    elif now is not None and now.bits == bits:
        table = now.table
    elif _can_read(source, layer, key, bits):
        table = source.table(key, bits).to(model.device)
    else:
        return None
    return _draft(linear, PlanesWeight(planes.planes[:bits], table, planes.in_features))


def _draft(linear: nn.Module, weight: PlanesWeight) -> AnyLinear:
    return AnyLinear(weight, bias_of(linear))


def bias_of(linear: nn.Module) -> Tensor | None:
    bias = linear.bias
    return bias.detach() if isinstance(bias, Tensor) else None


def _can_read(source: LinearSource, layer: int, key: str, bits: int) -> bool:
    copy = source.artefact
    file = None if copy is None else copy.manifest.of_layer(layer)
    return copy is not None and file is not None and key in file.shapes and bits in copy.widths


def moved(weight: PlanesWeight, device: torch.device) -> PlanesWeight:
    """The same, on a device."""
    return PlanesWeight(tuple(plane.to(device) for plane in weight.planes), weight.table.to(device), weight.in_features)
