"""What loads keep of the layers that they quantize: an any-precision copy of the node's own, filled layer by layer by whoever loads one first.

Called by `load_stage` where a model has no copy of `strata quantize`. A folder of the same form as one, without calibration and at all widths, in
`${XDG_CACHE_HOME:-~/.cache}/strata/quantized`. Of several loads of a node one quantizes a layer, and those that come meanwhile wait and read it. A load never
fails for its cache: where nothing can be kept, it says so once and goes on.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from strata_planner.contract.model_folder import MANIFEST_VERSION, LayerFile, Manifest, Recipe
from strata_runtime.errors import InputError
from strata_runtime.formats.any_precision import quantize_any
from strata_runtime.formats.planes.planes import pack_planes
from strata_runtime.formats.weights import PlanesWeight
from strata_runtime.loading.artefact import Artefact, DamagedError
from strata_runtime.loading.artefact_manifest import cache_folder, read_manifest
from strata_runtime.loading.artefact_writer import ArtefactWriter, LayerWriting, Shapes, file_bytes
from strata_runtime.loading.cache_room import claimed, make_room
from strata_runtime.loading.digest import model_digest_here

log = logging.getLogger(__name__)

RECIPE = Recipe()
FREE_SHARE = 0.16  # of a disk, that stays free: below 15 %, a kubelet evicts pods from its node


class LoadCache:
    """One load's view of what its node keeps of a model. A context: at its end, layers that were begun and not finished are let go.

    `layers`: how many the model has; `shapes`: the linears (key -> [N, K]) of each layer that this load stores at any precision, in the order in
    which they come; `keep`: whether those that are not there are to be added.
    `artefact`: of those layers the ones that this load read or wrote, so that what is read later belongs to what is held; and all others that are there.
    """

    def __init__(self, model_folder: Path, layers: int, shapes: Mapping[int, Shapes], *, keep: bool) -> None:
        """Raises InputError where the model's folder is damaged."""
        digest = model_digest_here(model_folder)
        self._empty = Manifest(MANIFEST_VERSION, digest, RECIPE, layers)
        self._folder = cache_folder(digest)
        self._shapes = shapes
        self._decided: set[int] = set()
        self._begun: dict[int, tuple[contextlib.ExitStack, LayerWriting]] = {}
        self._keeps = keep
        with self._kept_or_not():
            if keep:
                self._folder.parent.mkdir(parents=True, exist_ok=True)
        claim = claimed(self._folder)  # before anything in it is looked at
        others = tuple(file for file in self._manifest().files if file.layer not in shapes)
        self.artefact = Artefact(self._folder, self._with(others))
        self.artefact.claim = claim
        self.artefact.mend = f"run `rm -r {self._folder}`, the next load makes it anew"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer in tuple(self._begun):
            self._end(layer)

    def has(self, layer: int) -> bool:
        """Whether the layer can be read. The first time that it is asked of a layer which cannot, its file is begun."""
        if layer not in self._decided and layer in self._shapes:
            self._decided.add(layer)
            with self._kept_or_not():
                if not self._found(layer) and self._keeps:
                    self._begin(layer)
        return self.artefact.manifest.of_layer(layer) is not None

    def wants(self, layer: int) -> bool:
        """Whether the linears of this layer are to be added."""
        if not self._keeps:
            self._end(layer)
        return layer in self._begun

    def quantized(self, layer: int, key: str, weight: Tensor, bits: int, dtype: torch.dtype) -> PlanesWeight:
        """A linear at so many bits, of its weight [N, K] in the checkpoint's type; all that is wanted of it is kept."""
        parent = quantize_any(weight, RECIPE.bits, seed_bits=RECIPE.seed_bits)
        tables, planes = parent.tables, pack_planes(parent.codes, parent.bits)
        del parent  # its codes, before anything is written
        if self.wants(layer):
            self.add(layer, key, planes, tables)
        return PlanesWeight(planes[:bits], tables[bits].to(dtype), weight.shape[1])

    def add(self, layer: int, key: str, planes: Sequence[Tensor], tables: Mapping[int, Tensor]) -> None:
        """The next linear of a layer that is wanted, at the widest. With the last one its file is there."""
        writing = self._begun[layer][1]
        with self._kept_or_not():
            writing.add(key, planes, tables)
            if writing.whole:
                self._count(writing.finish())
        if writing.whole:
            self._end(layer)

    def forget(self, error: DamagedError) -> bool:
        """The file that is damaged is no more, so that a load quantizes its layer; False where that cannot be."""
        try:
            writer = ArtefactWriter(self._folder, self._empty.model_digest, self._empty.layers, RECIPE)
            writer.forget(error.file)
        except OSError:
            return False
        log.warning("layer %d is quantized anew: %s", error.file.layer, error)
        return True

    def _begin(self, layer: int) -> None:
        shapes = self._shapes[layer]
        with contextlib.ExitStack() as stack:
            self._check_room(file_bytes(shapes, RECIPE))
            writer = ArtefactWriter(self._folder, self._empty.model_digest, self._empty.layers, RECIPE)
            stack.enter_context(writer.alone(layer))
            if not self._found(layer):  # nor made by another process, meanwhile
                writing = stack.enter_context(writer.begun(layer, shapes))
                self._begun[layer] = stack.pop_all(), writing

    def _found(self, layer: int) -> bool:
        """Whether the layer's file is whole, which is then what this load reads."""
        file = self._manifest().of_layer(layer)
        try:
            Artefact(self._folder, self._with(() if file is None else (file,))).check([layer])
        except InputError:
            return False
        assert file is not None
        self._count(file)
        return True

    def _count(self, file: LayerFile) -> None:
        files = (*self.artefact.manifest.files, file)
        self.artefact.manifest = self._with(files)

    def _manifest(self) -> Manifest:
        """As it is now; empty where there is none that can be used."""
        return _usable(self._folder, self._empty.model_digest) or self._empty

    def _with(self, files: tuple[LayerFile, ...]) -> Manifest:
        empty = self._empty
        return Manifest(empty.version, empty.model_digest, empty.recipe, empty.layers, files)

    def _check_room(self, size_bytes: int) -> None:
        """Raises OSError."""
        place = next(each for each in (self._folder, *self._folder.parents) if each.exists())

        def short() -> bool:
            disk = shutil.disk_usage(place)
            return disk.free - size_bytes < FREE_SHARE * (disk.used + disk.free)

        make_room(self._folder, size_bytes, short)
        if short():
            disk = shutil.disk_usage(place)
            raise OSError(
                f"{place} has {disk.free >> 20} MiB free, of which {FREE_SHARE:.0%} of the disk are left alone"
            )

    @contextlib.contextmanager
    def _kept_or_not(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._keeps:
                log.warning(
                    "%s: what is quantized from now on is not kept there, the next load does it again: %s",
                    self._folder,
                    str(error),  # with its frames a record that is kept would keep weights
                )
            self._keeps = False

    def _end(self, layer: int) -> None:
        if layer in self._begun:
            with contextlib.suppress(OSError):
                self._begun.pop(layer)[0].close()


def kept_by_loads(model_folder: Path) -> Artefact | None:
    """What loads of this node have kept of a model until now. Raises InputError where the model's folder is damaged."""
    digest = model_digest_here(model_folder)
    folder = cache_folder(digest)
    claim = claimed(folder)
    manifest = _usable(folder, digest)
    if manifest is None:
        return None
    artefact = Artefact(folder, manifest)
    artefact.claim = claim
    return artefact


def _usable(folder: Path, digest: str) -> Manifest | None:
    """What is there of this release, model and recipe."""
    try:
        found = read_manifest(folder)
    except (InputError, OSError):
        return None
    return found if found is not None and (found.model_digest, found.recipe) == (digest, RECIPE) else None
