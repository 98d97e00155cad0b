"""A stage as a difference: what of it this process holds already is taken as it is, planes that stay are not read again, and what is left is to be loaded.

Used by `load_stage`. The stage that comes of it equals one that is loaded whole, bit for bit: only what was read from the same files counts as held.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from strata_planner.contract.draft_weights import has_draft
from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.formats.planes.any_linear import AnyLinear
from strata_runtime.formats.quant_linear import QuantLinear
from strata_runtime.formats.static8.activation_file import Activations
from strata_runtime.loading.adoption import adopt, drafts_of, has_planes_alone, move, twin
from strata_runtime.loading.artefact import find_artefact
from strata_runtime.loading.blocked import BlockedLinear
from strata_runtime.loading.digest import model_digest_here
from strata_runtime.loading.layer_store import HeldLayer, HeldOutside, LayerStore, Origin, Outside
from strata_runtime.loading.linear_source import ANY_FORMATS, LinearSource
from strata_runtime.loading.load_cache import kept_by_loads
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.loading.units import AnyUnit
from strata_runtime.model.adapter import ModelSlice


class Difference:
    """Of one role to what `store` holds. What is taken from there is put back as the stage that is made has it."""

    def __init__(
        self, role: Role, folder: Path, device: torch.device, store: LayerStore, activations: Activations | None
    ) -> None:
        """`activations`: of the model now, where the role has layers in `w8a8_static`. Raises InputError where the folder is damaged."""
        first, last = role.layers
        self._role = role
        self._store = store
        self._activations = activations
        self._origin = Origin(role.model_uri, model_digest_here(folder), role.compute_type, str(device))
        self._formats: dict[int, FormatName] = dict(zip(range(first, last + 1), role.format, strict=True))
        self._checksums = _checksums(folder, self._formats) if len(store) else {}
        self._held = {number: held for number in self._formats if (held := self._usable(number)) is not None}
        self._outside = store.outside(self._origin, Outside.of(role))
        self._drafts: dict[int, dict[str, AnyLinear]] = {}
        self.layers: dict[int, HeldLayer] = {}  # that are whole, as the new stage has them
        self.outside: HeldOutside | None = None

    @property
    def missing(self) -> list[int]:
        """The layers that are to be loaded."""
        return [number for number in self._formats if number not in self._held and number not in self.layers]

    @property
    def copied(self) -> list[int]:
        """Those of which the any-precision copy is wanted whole: of their planes, or of what they draft with."""
        layers = {number for number in self.missing if self._formats[number] in ANY_FORMATS}
        drafting = {number for number, name in self._formats.items() if has_draft(name, self._role.speculation)}
        return sorted(layers | {number for number in drafting if not self._keeps_drafts(number)})

    def take_layers(self, stage: ModelSlice, source: LinearSource, whole: Callable[[], None]) -> None:
        """Those that get fewer bits first, so that what they let go is there for the others. `whole` is called for each."""
        for number in sorted(self._held, key=self._growth):
            held, name = self._held.pop(number), self._formats[number]
            adopt(stage.layer(number), held.module)
            if held.format != name:
                move(stage.places(number), name, source)
            if self._keeps_drafts(number, held):
                self._drafts[number] = drafts_of(stage.places(number), held.module)
            self._store.drop(held)
            self.add(number, stage, source)
            whole()

    def take_outside(self, stage: ModelSlice) -> bool:
        """What is held of embedding, last norm and head; whether that is all."""
        held, has = self._outside, Outside.of(self._role)
        self._outside = None
        if held is None:
            return False
        own = stage.outside()
        for path, module in held.modules.items():
            mine = own.get(path)
            if mine is None:
                continue
            if type(mine) is type(module):
                adopt(mine, module)
            elif held.has == has or (
                isinstance(module, QuantLinear | BlockedLinear)
                and held.has.head_format == has.head_format
                and not stage.shares(path)
            ):
                stage.put_outside(path, twin(module))
        self._store.drop(held)
        return held.has == has

    def add(self, number: int, stage: ModelSlice, source: LinearSource) -> None:
        """A layer of the new stage is whole."""
        made = HeldLayer(self._origin, number, self._formats[number], source, stage.layer(number))
        self.layers[number] = made
        self._store.put(made)

    def add_unit(self, unit: AnyUnit, stage: ModelSlice, source: LinearSource) -> None:
        """A unit of a layer that was missing is stored."""
        if unit.ends_layer:
            self.add(unit.layer, stage, source)

    def add_outside(self, stage: ModelSlice) -> None:
        """What lies outside its layers is."""
        if self._role.embedding or self._role.head:
            self.outside = HeldOutside(self._origin, Outside.of(self._role), stage.outside())
            self._store.put(self.outside)

    def set_drafts(self, model: StageModel) -> None:
        """What taken layers drafted with, and are to draft with again."""
        for number, drafts in self._drafts.items():
            for key, draft in drafts.items():
                kept = twin(draft)
                assert isinstance(kept, AnyLinear)
                model.set_draft(number, key, kept)

    def _usable(self, number: int) -> HeldLayer | None:
        name = self._formats[number]
        held = self._store.layer(self._origin, number, name)
        if held is None or not self._is_current(held, name):
            return None
        if held.format != name and (held.copy is None or not has_planes_alone(held.module)):
            return None
        return held

    def _is_current(self, held: HeldLayer, name: FormatName) -> bool:
        """Whether it is what would be read now."""
        if name in ANY_FORMATS:
            return held.copy == self._checksums.get(held.number)
        if name == "w8a8_static":
            return _same(held.source.activations, self._activations)
        return True

    def _keeps_drafts(self, number: int, held: HeldLayer | None = None) -> bool:
        held = held or self._held.get(number)
        wish = self._role.speculation
        if held is None or held.copy != self._checksums.get(number) or not has_draft(self._formats[number], wish):
            return False
        return held.draft_bits == wish.draft_bits

    def _growth(self, number: int) -> int:
        return BITS_OF_FORMAT[self._formats[number]] - BITS_OF_FORMAT[self._held[number].format]


def _checksums(folder: Path, formats: Mapping[int, FormatName]) -> dict[int, str]:
    """Of the files that layers would be read from now. A copy that cannot be used has none: whoever needs it is told by whoever reads it."""
    try:
        copy = find_artefact(folder) or kept_by_loads(folder)
    except InputError:
        return {}
    files = () if copy is None else copy.manifest.files
    return {file.layer: file.sha256 for file in files if file.layer in formats}


def _same(one: Activations | None, other: Activations | None) -> bool:
    if one is None or other is None or one.entries.keys() != other.entries.keys():
        return False
    pairs = ((one.entries[key], other.entries[key]) for key in one.entries)
    return all(mine.scale == its.scale and torch.equal(mine.smoothing, its.smoothing) for mine, its in pairs)
