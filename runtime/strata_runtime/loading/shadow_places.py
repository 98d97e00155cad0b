"""Which bytes of a model's files a load would read for layers that another slot has, and reading them bit by bit.

Called by `slot.shadowing`. They are found by what a load goes by: the modules of the stage, its units, and the any-precision copy of the layers that have one.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strata_planner.contract.formats import BITS_OF_FORMAT
from strata_planner.contract.shadows import ShadowOrder
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.kernels.native_crc import crc32
from strata_runtime.loading.artefact import Artefact, find_artefact
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.linear_source import ANY_FORMATS
from strata_runtime.loading.load_cache import kept_by_loads
from strata_runtime.loading.quantized import quantized_checkpoint, read_model_config
from strata_runtime.loading.shadow import Place
from strata_runtime.loading.units import AnyUnit, Unit, units_of
from strata_runtime.model.adapter import ModelSlice

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """`layer`: None outside of all layers; `check`: its CRC-32, where one was noted."""

    place: Place
    layer: int | None
    check: int | None = None


def wanted_of(order: ShadowOrder, folder: Path) -> dict[Place, Wanted]:
    """Layer by layer, then what lies outside. Raises InputError for a folder that is damaged, or of a model that has no such layers."""
    config = read_model_config(folder)
    layers = order.layers or (0,)
    if layers[-1] >= config.num_hidden_layers:
        raise InputError(f"layer {layers[-1]} is to be kept; {folder} has {config.num_hidden_layers}: plan again")
    checkpoint = quantized_checkpoint(folder) or Checkpoint(folder)
    dtype = COMPUTE_DTYPES[order.compute_type]
    stage = ModelSlice(config, (layers[0], layers[-1]), embedding=order.embedding, head=order.head, dtype=dtype)
    sources = stage.sources(checkpoint.keys)
    copy = _copy_of(folder)
    found = [
        wanted
        for layer, formats in zip(order.layers, order.formats, strict=True)
        for name in formats
        for unit in units_of(stage, checkpoint, layer, name, sources[layer])
        for wanted in _of_unit(unit, checkpoint, copy)
    ]
    found += [Wanted(place, None) for key in sources.get(None, ()) for place in checkpoint.places(key)]
    return {wanted.place: wanted for wanted in found}


def _copy_of(folder: Path) -> Artefact | None:
    """One that cannot be used is told by whoever loads."""
    try:
        return find_artefact(folder) or kept_by_loads(folder)
    except InputError as error:
        log.warning("no planes are kept: %s", error)
        return None


def _of_unit(unit: AnyUnit, checkpoint: Checkpoint, copy: Artefact | None) -> Iterator[Wanted]:
    if not isinstance(unit, Unit):  # matrices of fused experts are parts of tensors, and are read
        names = [row.name for row in unit.rows if row.index is None]
        yield from (Wanted(place, unit.layer) for name in names for place in checkpoint.places(name))
        return
    tensors = dict(unit.tensors)
    file = None if copy is None or unit.format not in ANY_FORMATS else copy.manifest.of_layer(unit.layer)
    if copy is not None and file is not None and unit.key in file.shapes:
        del tensors["weight"]
        for place, check in copy.places(unit.key, BITS_OF_FORMAT[unit.format]):
            yield Wanted(place, unit.layer, check)
    for name in tensors.values():
        yield from (Wanted(place, unit.layer) for place in checkpoint.places(name))


def read_slowly(wanted: Wanted, between: Callable[[int], None], *, pinned: bool) -> Tensor:
    """uint8 [bytes]. `between` is called after each few MiB with their number. Raises InputError where the bytes are not all there or not those that were noted."""
    place, crc, done = wanted.place, 0, 0
    flat = torch.empty(place.size_bytes, dtype=torch.uint8, pin_memory=pinned)
    memory: memoryview = flat.numpy().data
    descriptor = os.open(place.file, os.O_RDONLY)
    try:
        while done < place.size_bytes:
            part = memory[done : done + CHUNK_BYTES]
            count = os.preadv(descriptor, [part], place.begin + done)
            if not count:
                raise InputError(f"{place.file} ends at byte {place.begin + done}: it was cut off")
            if wanted.check is not None:
                crc = crc32(part[:count], crc)
            done += count
            between(count)
    finally:
        os.close(descriptor)
    if wanted.check is not None and crc != wanted.check:
        raise InputError(f"{place.file} was changed or damaged at bytes {place.begin}..{place.end}: it is not kept")
    return flat
