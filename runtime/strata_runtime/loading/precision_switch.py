"""Other bits for one layer of a stage while it lives: all that it takes is read first, then swapped at once between two steps.

Called by `slot.switching`, in a thread beside the worker, and by a prepare that keeps planes. Layers move among `any3` ... `any8` and 16 bits; what is read comes
from the stage's `LinearSource`. Going down among planes reads tables alone; the planes that stay are never copied. Knows no steps and no budgets.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from strata_planner.contract.draft_weights import draft_bytes, kept_bytes
from strata_planner.contract.formats import (
    ANY_PRECISION,
    ComputeType,
    FormatName,
    stored_bytes,
)
from strata_planner.contract.roles import Role
from strata_runtime.allocator import freed_at_once
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES, QuantLinear
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.huge_pages import gather_beside
from strata_runtime.loading.artefact import find_artefact
from strata_runtime.loading.artefact_manifest import read_manifest
from strata_runtime.loading.blocked import can_block, dense_linear
from strata_runtime.loading.drafts import bias_of, draft_of, moved
from strata_runtime.loading.linear_source import LinearSource
from strata_runtime.loading.load_cache import kept_by_loads
from strata_runtime.loading.stage_model import StageModel

FORMAT_OF_BITS: dict[int, FormatName] = {**ANY_PRECISION, 16: "dense"}  # what a layer can move to
_MOVABLE = {*FORMAT_OF_BITS.values(), "any4_a8"}
_COMPUTE_TYPES: dict[torch.dtype, ComputeType] = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}


@dataclass(frozen=True)
class Growth:
    """Bytes that a change brings and those that it lets go; at the moment of the swap both are held. `passing_bytes`: more, held while it is read."""

    added_bytes: int = 0
    returned_bytes: int = 0
    passing_bytes: int = 0

    @property
    def net_bytes(self) -> int:
        return self.added_bytes - self.returned_bytes

    @property
    def peak_bytes(self) -> int:
        """Beyond what was held before, until the change is released."""
        return self.added_bytes + self.passing_bytes

    def __add__(self, other: "Growth") -> "Growth":
        return Growth(
            self.added_bytes + other.added_bytes,
            self.returned_bytes + other.returned_bytes,
            max(self.passing_bytes, other.passing_bytes),  # linears are read one after the other
        )


@dataclass
class Change:
    """One layer's new weights, read and checked. `apply` once, while no step runs; then `release`."""

    model: StageModel
    layer: int
    bits: int
    growth: Growth
    read_seconds: float
    stored: dict[str, PlanesWeight]  # key -> what a linear of planes, which stays in its place, will store
    modules: dict[str, nn.Module]  # key -> what takes a linear's place
    drafts: dict[str, AnyLinear | None]  # key -> what it drafts with from then on
    _let_go: list[object] = field(default_factory=list)

    def apply(self) -> None:
        """Assignments alone: there is nothing here that could fail half-way, and nothing is freed."""
        held = self.model.linears(self.layer)
        self._let_go.append(held)
        for key, weight in self.stored.items():
            linear = held[key]
            assert isinstance(linear, AnyLinear)
            self._let_go.append(linear.store(weight))
        for key, module in self.modules.items():
            self.model.replace(self.layer, key, module)
        for key, draft in self.drafts.items():
            self._let_go.append(self.model.draft(self.layer, key))
            self.model.set_draft(self.layer, key, draft)
        if self.layer in self.model.held:
            self.model.held[self.layer].format = FORMAT_OF_BITS[self.bits]

    def release(self) -> None:
        """Give the memory of what was before back to the system. Steps may run."""
        with freed_at_once():
            self._let_go.clear()
            self.stored.clear()
            self.modules.clear()
            self.drafts.clear()
        gather_beside(self.model.linears(self.layer).values())
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep what was freed for itself


def check_change(model: StageModel, layer: int, bits: int) -> None:
    """Before anything is read: raises InputError if the layer cannot move to these bits, with what would let it, UnsupportedModelError if no layer of
    this model can.
    """
    if bits not in FORMAT_OF_BITS:
        raise InputError(f"layer {layer}: {bits} bits; a layer moves among {', '.join(map(str, FORMAT_OF_BITS))}")
    model.check_format(FORMAT_OF_BITS[bits])
    linears = model.linears(layer)
    fixed = sorted({format_of(module) for module in linears.values()} - _MOVABLE)
    if fixed:
        raise InputError(
            f"layer {layer} is stored in {fixed[0]}, from which no other bits can be made; plan the model with any-precision formats "
            "(any3 ... any8) or 16 bits, whose layers move"
        )
    source = _source(model)
    if bits == 16:
        return
    if source.artefact is None or source.artefact.manifest.of_layer(layer) is None:
        raise InputError(
            f"layer {layer} cannot change to {bits} bits: {source.folder} has no any-precision copy of it, nor had this node kept one when it was loaded; "
            f"run `strata quantize {source.folder}` once, then load the model again"
        )
    source.artefact.check([layer])
    for key in linears:
        source.artefact.shape(key)
    now = read_manifest(source.artefact.folder)
    held = source.artefact.manifest.of_layer(layer)
    there = None if now is None else now.of_layer(layer)
    if held is None or there is None or there.sha256 != held.sha256:
        raise InputError(
            f"layer {layer}: the planes in {source.artefact.folder} are not those that this slot holds, they were made anew; load the model again"
        )


def growth_of(model: StageModel, layer: int, bits: int) -> Growth:
    """What `read_change` will count, told without reading."""
    return _sum(_growth(module, FORMAT_OF_BITS[bits], model) for module in model.linears(layer).values())


def read_change(model: StageModel, layer: int, bits: int) -> Change:
    """Read and build all that makes the layer (numbered as in the whole model) one of `bits` bits; nothing is changed yet.

    Steps may run meanwhile. Raises InputError as `check_change`, or for files that are damaged; OSError if they cannot be read.
    """
    check_change(model, layer, bits)
    started = time.perf_counter()
    growth = growth_of(model, layer, bits)
    change = Change(model, layer, bits, growth, 0.0, {}, {}, {})
    source = _source(model)
    with freed_at_once(), torch.inference_mode():
        for key, module in model.linears(layer).items():
            if bits == 16 and not isinstance(module, AnyLinear):
                continue
            planes = None
            if bits == 16:
                change.modules[key] = dense_linear(source.dense(key).to(model.device), bias_of(module))
            elif isinstance(module, AnyLinear):
                missing = source.missing_planes(key, module.bits, bits) if bits > module.bits else ()
                table = source.table(key, bits).to(model.device)
                planes = change.stored[key] = module.with_bits(
                    bits, table, [plane.to(model.device) for plane in missing]
                )
            else:
                planes = moved(source.planes(key, bits), model.device)
                change.modules[key] = AnyLinear(planes, bias_of(module))
            change.drafts[key] = draft_of(model, layer, key, module, FORMAT_OF_BITS[bits], planes)
    change.read_seconds = time.perf_counter() - started
    return change


def role_after(role: Role, change: Change) -> Role:
    """What the slot holds when the change has been applied: another prepare compares with it."""
    place = change.layer - role.layers[0]
    return msgspec.structs.replace(
        role.grown(change.model.rank, change.growth.net_bytes),
        bits=(*role.bits[:place], change.bits, *role.bits[place + 1 :]),
        format=formats_after(role, {change.layer: change.bits}),
    )


def formats_after(role: Role, moves: Mapping[int, int]) -> tuple[FormatName, ...]:
    """Of the role's layers, once those of `moves` (layer -> bits) have moved."""
    layers = enumerate(role.format, start=role.layers[0])
    return tuple(FORMAT_OF_BITS[moves[layer]] if layer in moves else name for layer, name in layers)


def format_of(module: nn.Module) -> FormatName:
    return module.format if isinstance(module, QuantLinear) else "dense"


def _growth(module: nn.Module, after: FormatName, model: StageModel) -> Growth:
    before = format_of(module)
    shape: tuple[int, int] = (module.out_features, module.in_features)  # type: ignore[assignment]  # of every linear
    if before == after:
        return Growth()
    compute_type, wish = _COMPUTE_TYPES[model.dtype], model.speculation
    wanted, held = (
        stored_bytes(name, *shape, compute_type) + draft_bytes(name, *shape, compute_type, wish)
        for name in (after, before)
    )
    kept = kept_bytes(before, after, shape, compute_type, wish)
    passing = (
        stored_bytes(after, *shape, compute_type) if after == "dense" and can_block(model.dtype, model.device) else 0
    )
    return Growth(wanted - kept, held - kept, passing)


def _sum(parts: Iterable[Growth]) -> Growth:
    total = Growth()
    for part in parts:
        total += part
    return total


def _source(model: StageModel) -> LinearSource:
    """Where the stage's weights lie. A stage that holds no planes yet takes the copy that was made after it was loaded."""
    source = model.source
    if source is None:
        raise InputError("this stage was not loaded from a model's folder: its layers have nowhere to read from")
    modules = (module for layer in model.layers for module in layer.modules())
    if source.artefact is None and not any(isinstance(module, AnyLinear) for module in modules):
        source.artefact = find_artefact(source.folder) or kept_by_loads(source.folder)
    return source
