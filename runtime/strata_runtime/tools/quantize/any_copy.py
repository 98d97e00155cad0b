"""The pass over a model that writes its any-precision copy: each layer's linears are read, quantized and written one after the other.

Called by `__main__`. The next linear is read while one is quantized; at most two are held dense, and with a calibration one layer's Fisher
diagonals and Hessians. Layers that an earlier run finished are kept, and so are the passes of its calibration (`.calibration/` until all layers are there).

The inputs that tables are fitted to are those of the 16-bit model: one copy serves every mixture of widths, so there are no quantized layers whose outputs
a layer will certainly see; and a layer's file depends on no other file, so that any of them can be made anew, in any order, by any process.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from strata_planner.contract.architectures import check_formats
from strata_planner.contract.formats import ANY_PRECISION
from strata_planner.contract.model_folder import Recipe
from strata_runtime.allocator import freed_at_once
from strata_runtime.errors import InputError
from strata_runtime.formats.any_precision import AnyParent, quantize_any, refit
from strata_runtime.formats.any_precision.refit import WIDTHS
from strata_runtime.loading.artefact_writer import ArtefactWriter, Shapes
from strata_runtime.loading.checkpoint import Checkpoint
from strata_runtime.loading.digest import model_digest
from strata_runtime.loading.stream import ahead
from strata_runtime.model.adapter import ModelSlice, read_config
from strata_runtime.tools.calibration.fisher import BACKWARD, FORWARD, LayerCalibration, Wanted, calibrated_layers
from strata_runtime.tools.calibration.kept import FOLDER, KeptStates

_CPU = torch.device("cpu")
_QUANTIZED = 1  # beside the passes of a calibration


@dataclass(frozen=True)
class Job:
    """What to make of which model, where. `windows`: token ids of the calibration, empty without one; `refit`: fit tables to its inputs."""

    model: Path
    folder: Path
    bits: int
    seed_bits: int = 3
    windows: Sequence[Tensor] = ()
    device: torch.device = _CPU
    refit: bool = True

    @property
    def refitted(self) -> tuple[int, ...]:
        """Widths whose tables are fitted."""
        fitted = self.refit and self.windows
        return tuple(width for width in WIDTHS if self.seed_bits <= width <= self.bits) if fitted else ()

    @property
    def recipe(self) -> Recipe:
        """The windows themselves, not the file that they came from, tell one calibration from another."""
        digest = hashlib.sha256()
        for window in self.windows:
            digest.update(window.to(torch.int64).numpy().tobytes())
        return Recipe(self.bits, self.seed_bits, digest.hexdigest() if self.windows else None, self.refitted)


@dataclass(frozen=True)
class LayerDone:
    """`kept`: an earlier run had finished it."""

    layer: int
    shapes: Shapes
    seconds: float
    kept: bool
    size_bytes: int


def make_copy(job: Job, progress: Callable[[int, int], None]) -> list[LayerDone]:
    """All layers' files, by layer; `progress(done, total)` counts weights, those of passes of a calibration too. Can be stopped at any time and started again.

    Raises UnsupportedModelError and InputError as loading does.
    """
    config = read_config(job.model)
    check_formats(config.to_dict(), (ANY_PRECISION[job.bits],))
    count = config.num_hidden_layers
    weights = _Weights(job.model, count)
    writer = ArtefactWriter(job.folder, model_digest(job.model), count, job.recipe)
    done: dict[int, LayerDone] = {}
    for layer in range(count):
        kept = writer.finished(layer)
        if kept is not None:
            done[layer] = LayerDone(layer, kept.shapes, 0.0, kept=True, size_bytes=kept.size_bytes)
    left = sorted(set(range(count)) - done.keys())
    counted = _Counted(progress, weights, job, left)
    with freed_at_once(), _kept_passes(job) as passes:
        for found in _calibrations(job, left, counted, passes):
            layer = found.layer
            with writer.alone(layer):
                kept = writer.finished(layer)  # made by another process, meanwhile
                started = time.perf_counter()
                if kept is None:
                    parents = weights.quantized(found, job, counted)
                    made = writer.write(layer, weights.shapes(layer), parents)
                else:
                    made = kept
                    counted.passed(layer, _QUANTIZED)
            seconds = time.perf_counter() - started
            done[layer] = LayerDone(layer, made.shapes, seconds, kept=kept is not None, size_bytes=made.size_bytes)
            del found  # before the next layer's is there
        passes.clear()
    return [done[layer] for layer in sorted(done)]


def _kept_passes(job: Job) -> KeptStates:
    """Of the calibration; without one, what another left is removed."""
    folder = job.folder / FOLDER
    decides = f"{model_digest(job.model)} {job.recipe.text_sha256} {job.device.type} {torch.__version__}"
    return KeptStates(folder if job.windows or folder.is_dir() else None, decides)


def _calibrations(job: Job, layers: Sequence[int], counted: "_Counted", kept: KeptStates) -> Iterator[LayerCalibration]:
    """Each layer with what the text says of its linears: the last layer first, as gradients come; without a calibration nothing, in order."""
    if job.windows:
        return calibrated_layers(
            job.model,
            job.windows,
            Wanted(layers, hessians=bool(job.refitted)),
            device=job.device,
            passed=counted.passed,
            kept=kept,
        )
    return (LayerCalibration(layer, {}, {}) for layer in layers)


class _Weights:
    """A model's linears: shapes without reading anything, weights linear by linear."""

    def __init__(self, model: Path, layers: int) -> None:
        stage = ModelSlice(read_config(model), (0, layers - 1), embedding=False, head=False, dtype=torch.float32)
        self._checkpoint = Checkpoint(model)
        self._checkpoint.transposed = stage.transposed(self._checkpoint.keys)
        self._sources: dict[str, str] = {}
        for name in self._checkpoint.keys:
            linear, _, what = (stage.plain_parameter(name) or "").rpartition(".")
            if what == "weight":
                self._sources[linear] = name
        self._shapes: dict[int, Shapes] = {}
        for layer in range(layers):
            linears = {key: getattr(parent, name) for key, (parent, name) in stage.places(layer).items()}
            self._shapes[layer] = {key: (each.out_features, each.in_features) for key, each in linears.items()}
        absent = [key for shapes in self._shapes.values() for key in shapes if key not in self._sources]
        if absent:
            raise InputError(
                f"{model} has no dense weight for {len(absent)} linears, for instance {absent[0]}: it is incomplete or quantized already; "
                "give the checkpoint that it was made of"
            )
        self._checkpoint.check(self._sources[key] for shapes in self._shapes.values() for key in shapes)

    @property
    def layers(self) -> int:
        return len(self._shapes)

    def shapes(self, layer: int) -> Shapes:
        return self._shapes[layer]

    def count(self, layer: int) -> int:
        """Weights of a layer's linears."""
        return sum(prod(shape) for shape in self._shapes[layer].values())

    def quantized(
        self, calibration: LayerCalibration, job: Job, counted: "_Counted"
    ) -> Iterator[tuple[str, AnyParent]]:
        """A linear at a time, the next one being read meanwhile."""
        keys = list(self._shapes[calibration.layer])
        for key, read in zip(keys, ahead(partial(self._read, key) for key in keys), strict=True):
            weight = read.pop().to(job.device)
            parent = quantize_any(weight, job.bits, importance=calibration.fisher.get(key), seed_bits=job.seed_bits)
            if key in calibration.hessians:
                parent = refit(parent, weight, calibration.hessians[key], widths=job.refitted)
            counted.add(prod(self._shapes[calibration.layer][key]))
            yield key, parent

    def _read(self, key: str) -> list[Tensor]:
        """In a list, so that it can be taken out and freed."""
        name = self._sources[key]
        return [self._checkpoint.read([name], None, _CPU)[name]]


class _Counted:
    """Weights that are done, of all; a pass of the calibration through a layer counts its weights as often as it multiplies by them."""

    def __init__(self, progress: Callable[[int, int], None], weights: _Weights, job: Job, left: Sequence[int]) -> None:
        """`left`: layers that are not there yet. The others count as done."""
        self._progress = progress
        self._weights = weights
        layers = range(weights.layers)
        passes = dict.fromkeys(layers, _QUANTIZED)
        if job.windows and left:
            passes = {layer: _QUANTIZED + FORWARD + BACKWARD * (layer >= min(left)) for layer in layers}
        self._total = sum(weights.count(layer) * work for layer, work in passes.items())
        self._done = 0
        self.add(sum(weights.count(layer) for layer in set(layers).difference(left)))

    def add(self, weights: int) -> None:
        self._done += weights
        self._progress(self._done, self._total)

    def passed(self, layer: int, work: int) -> None:
        self.add(self._weights.count(layer) * work)
