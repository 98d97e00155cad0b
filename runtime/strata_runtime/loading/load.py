"""Loading one role: from a checkpoint to a StageModel, linear by linear.

Called by the slot's prepare. While one linear is stored in its format and its dense weight freed, a thread reads the next one: beyond the
finished stage at most two linears are held as they were read, whatever the model's size (one layer where the checkpoint's tensors are not those of
the model, as merged experts). Bit-planes come from the model's any-precision copy where it has one, or from what earlier loads of this node kept, and
of that only the planes that the format needs; what a load quantizes itself it keeps there (`load_cache`). Tensors of other layers are not read; files are read, not mapped, so that stages of one machine share the page cache and no more.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata_planner.contract.architectures import check_formats
from strata_planner.contract.divided import DIVIDED_FORMATS
from strata_planner.contract.roles import Role
from strata_planner.contract.strategies import switches, why_not_switched
from strata_runtime.allocator import freed_at_once
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.formats.static8.activation_file import activations_of
from strata_runtime.formats.vendor_sums import add_in_float32
from strata_runtime.huge_pages import gather_beside
from strata_runtime.loading.artefact import Artefact, DamagedError, find_artefact
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.difference import Difference
from strata_runtime.loading.digest import model_digest
from strata_runtime.loading.drafts import add_drafts
from strata_runtime.loading.layer_store import LayerStore
from strata_runtime.loading.linear_source import LinearSource
from strata_runtime.loading.load_cache import LoadCache
from strata_runtime.loading.loader import Loader
from strata_runtime.loading.quantized import quantized_checkpoint, read_model_config
from strata_runtime.loading.shadow import Shadow
from strata_runtime.loading.shared_layers import share_layers
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.units import Unit, units_of
from strata_runtime.loading.verify import Beside, at_once, never
from strata_runtime.model.adapter import ModelSlice
from strata_runtime.model.divided import Division
from strata_runtime.model.experts import use_padded_experts
from strata_runtime.ranks.collectives import Collectives
from strata_runtime.ranks.shared_memory import SharedMemory
from strata_runtime.stopwatch import Stopwatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a stage is loaded.

    keep: layers that are quantized at any precision for want of a copy stay in the node's cache, for the next load; what is there is read either way.
    verify: planes and tables are compared with the checks of their copy as they are read, all of them before the load ends. Of what the node keeps, a layer
    that is damaged is quantized anew.
    collectives: where several ranks share the stage: the part of this one alone is loaded, and only its bytes are read where a format allows.
    shadow: what it keeps of files for takeovers; what of it is wanted is taken, and read no more.
    store: what this process holds already; what the role has too is taken from there. Not for what ranks share.
    """

    keep: bool = False
    verify: bool = True
    collectives: Collectives | None = None
    store: LayerStore | None = None
    shadow: Shadow | None = None


def load_stage(
    role: Role,
    model_path: Path,
    progress: Callable[[int, int], None],
    device: torch.device,
    options: LoadOptions = LoadOptions(),
) -> StageModel:
    """The role's layers from the folder `model_path`, on `device`. `progress(done, total)` counts whole layers, and is called after each linear.

    Raises UnsupportedModelError for what the engine or a format cannot do, InputError for a checkpoint or an any-precision copy that is damaged,
    incomplete, of another model, or does not have the role's layers.
    """
    add_in_float32(device)
    while True:
        try:
            return _load(role, model_path, progress, device, options)
        except _ForgottenError:
            continue  # one damaged file less


class _ForgottenError(Exception):
    """A file of what the node keeps was damaged, and is no more."""


def _load(
    role: Role,
    model_path: Path,
    progress: Callable[[int, int], None],
    device: torch.device,
    options: LoadOptions,
) -> StageModel:
    config = read_model_config(model_path)
    check_formats(config.to_dict(), role.format)
    first, last = role.layers
    if last >= config.num_hidden_layers:
        raise InputError(
            f"role asks for layers {first}..{last}; {model_path} has {config.num_hidden_layers}: plan again"
        )
    dtype = COMPUTE_DTYPES[role.compute_type]
    checkpoint = quantized_checkpoint(model_path) or Checkpoint(model_path)
    if options.collectives is not None:
        _check_divisible(role)
    watch = Stopwatch()
    with watch.during("model without weights"):
        stage = ModelSlice(
            config,
            role.layers,
            embedding=role.embedding,
            head=role.head,
            dtype=dtype,
            division=_division(config, role, options),
        )
    use_padded_experts(stage.module)
    checkpoint.transposed = stage.transposed(checkpoint.keys)
    sources = stage.sources(checkpoint.keys)
    formats = dict(zip(range(first, last + 1), role.format, strict=True))
    activations = activations_of(model_path, model_digest(model_path)) if "w8a8_static" in role.format else None
    difference = Difference(role, model_path, device, _store(options), activations)
    missing = difference.missing
    checkpoint.check(key for layer, keys in sources.items() if layer is None or layer in missing for key in keys)
    units = [
        unit for layer, name in formats.items() for unit in units_of(stage, checkpoint, layer, name, sources[layer])
    ]
    plain = [unit for unit in units if isinstance(unit, Unit)]
    weights = {unit.key: unit.tensors["weight"] for unit in plain if unit.key}
    artefact, cache = _copies(difference.copied, model_path, stage, plain, config.num_hidden_layers, keep=options.keep)
    source = LinearSource(checkpoint, artefact, weights, dtype, stage.cuts, activations)
    loader = Loader(stage, checkpoint, source, cache, dtype, device)
    loader.prepare_memory(unit for unit in plain if unit.layer in missing)
    stage.initialise_buffers(device)

    def tell() -> None:
        progress(len(difference.layers), last - first + 1)

    with (
        freed_at_once(),
        _forgetting(cache),
        cache or contextlib.nullcontext(),
        _checking(artefact, verify=options.verify),
        _taking(options.shadow, checkpoint, artefact),
    ):
        loader.fill(
            difference,
            sources.get(None, ()),
            role.head_format,
            [unit for unit in units if unit.layer in missing],
            tell,
        )
        stage.finish()
        model = StageModel(stage, num_layers=last - first + 1, device=device, source=source)
        _share_among_ranks(model, stage, role, options.collectives)
        difference.set_drafts(model)
        add_drafts(model, role, cache, tell)
    gather_beside([stage.module])
    if source.artefact is not None and not source.artefact.manifest.files:
        source.artefact = None
    if options.collectives is None:
        model.held, model.held_outside = difference.layers, difference.outside
    watch.tell(log)
    loader.watch.tell(log)
    return model


def _share_among_ranks(model: StageModel, stage: ModelSlice, role: Role, collectives: Collectives | None) -> None:
    """Weights that ranks read of each other, where steps switch between strategies."""
    can_switch = switches(role.strategies) and not why_not_switched(
        stage.module.config.model_type, role.format, model.device.type
    )
    if isinstance(collectives, SharedMemory) and can_switch:
        first, last = role.layers
        model.switch = share_layers(stage, range(first, last + 1), collectives)


def _store(options: LoadOptions) -> LayerStore:
    """Of ranks each has a part of a layer."""
    return LayerStore() if options.store is None or options.collectives is not None else options.store


def _division(config: Any, role: Role, options: LoadOptions) -> Division | None:
    """None where one rank has all of the role's layers. Raises InputError for a model of which it is not known how ranks share it."""
    return None if options.collectives is None else Division(config, options.collectives, role.shares)


def _check_divisible(role: Role) -> None:
    """Raises InputError for what ranks cannot share."""
    wrong = sorted({name for name in role.format if name not in DIVIDED_FORMATS})
    if wrong:
        raise InputError(
            f"a stage over several devices is stored in {', '.join(DIVIDED_FORMATS)}, not in {', '.join(wrong)}: allow other bits, or stages of one "
            "device each"
        )


@contextlib.contextmanager
def _checking(artefact: Artefact | None, *, verify: bool) -> Iterator[None]:
    """What is read of a copy is checked by threads beside the load; later, when a layer changes its bits, by whoever reads."""
    if artefact is None:
        yield
    elif not verify:
        log.warning("%s is not compared with its checks (--no-verify): damaged planes would be served", artefact.folder)
        artefact.checked = never
        yield
    else:
        try:
            with Beside() as artefact.checked:
                yield
        finally:
            artefact.checked = at_once


@contextlib.contextmanager
def _taking(shadow: Shadow | None, checkpoint: Checkpoint, artefact: Artefact | None) -> Iterator[None]:
    """While the stage is loaded: what reads its files later holds no shadow."""
    readers: list[Checkpoint | Artefact] = [checkpoint, *([artefact] if artefact is not None else [])]
    for each in readers:
        each.shadow = shadow if shadow is not None and shadow.held_bytes else None
    try:
        yield
    finally:
        for each in readers:
            each.shadow = None


@contextlib.contextmanager
def _forgetting(cache: LoadCache | None) -> Iterator[None]:
    """Raises _ForgottenError in the place of DamagedError where a file could be let go."""
    try:
        yield
    except DamagedError as error:
        if cache is None or not cache.forget(error):
            raise
        raise _ForgottenError from None


def _copies(
    wanted: Sequence[int],
    model_path: Path,
    stage: ModelSlice,
    units: Sequence[Unit],
    layers: int,
    *,
    keep: bool,
) -> tuple[Artefact | None, LoadCache | None]:
    """The model's any-precision copy; where a layer is wanted of it, its file is found whole first. Without one, what loads of this node keep.

    A copy that cannot be used is refused by name, unless no layer needs it.
    """
    try:
        artefact = find_artefact(model_path)
        if artefact is not None:
            artefact.check(wanted)
            return artefact, None
    except InputError as error:
        if wanted:
            raise
        log.warning("precision cannot be changed while the stage runs: %s", error)
        return None, None
    shapes: dict[int, dict[str, tuple[int, int]]] = {layer: {} for layer in wanted}
    for unit in units:
        if unit.key and unit.layer in shapes:
            shapes[unit.layer][unit.key] = stage.whole_shape(unit.layer, unit.key)
    plain = {layer: linears for layer, linears in shapes.items() if linears.keys() == stage.places(layer).keys()}
    cache = LoadCache(model_path, layers, plain, keep=keep)
    return cache.artefact, cache
