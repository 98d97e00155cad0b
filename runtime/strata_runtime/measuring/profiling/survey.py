"""The survey: every work of the grid in every format that is asked for, several passes over all of them, to a LatencyProfile.

Called by `python -m strata_runtime.measuring.profiling` and by benchmarks. Passes lie apart, so that a busy moment of the machine does not meet all runs of
a point. Weights are gone through in turn over as many layers as are beyond the last cache, or as the model has if that is fewer: a model
that fits in the cache also runs from there. A profile that has other formats already is extended: what it holds stays as it is.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.latencies import (
    LATENCY_PROFILE_VERSION,
    HandlingPoint,
    HeadPoint,
    KernelRange,
    LatencyPoint,
    LatencyProfile,
    ProfiledDevice,
    ProfiledModel,
    row_sizes,
)
from strata_planner.contract.rows import padded_rows
from strata_runtime.errors import InputError
from strata_runtime.formats import COMPUTE_DTYPES
from strata_runtime.measuring.profiling.company import in_company
from strata_runtime.measuring.profiling.grid import DECODE_SEQUENCES, FORMATS, Limits, Work, cost_order, grid
from strata_runtime.measuring.profiling.handling import LOADS, Load, idle_pipeline
from strata_runtime.measuring.profiling.model import Sizes, shapes_of
from strata_runtime.measuring.profiling.notes import Name, Notes
from strata_runtime.measuring.profiling.stage import ProfiledStage, StageSpec, Taken
from strata_runtime.measuring.profiling.stored import ShallowModels, make_models
from strata_runtime.measuring.timing import copies_beyond_cache
from strata_runtime.model.padding import pads

PASSES = 3
# A pipeline's seconds are sums of many steps, so each is told as it typically is. Of one thread's own time, which leaves out what other
# programs took; they still slow it where they use the same memory, and that is part of the machine as it is.
TYPICAL = 0.5
MOST_RUNS = 6  # of a work in a pass, or as many as fit in
PASS_SECONDS = 0.06
SLOW_SECONDS = 0.3  # what takes longer is not run once more for warming up, and
MOST_SECONDS = 4.0  # what takes longer than this is left to extrapolation
MANY_ROWS = 128  # beyond, arithmetic binds and a few layers are enough
FEW_LAYERS = 3
MOST_CACHE_BYTES = 1 << 30
MOST_CACHED_TOKENS = 1 << 15
MAX_STEP_TOKENS = 2048  # the planner's longest step
MOST_POSITIONS = 2 * MAX_STEP_TOKENS
_ROWS_LOOKED_AT = 1024


@dataclass(frozen=True)
class Subject:
    """What is surveyed: a model's config.json fields, on a device, in a compute type."""

    fields: dict[str, Any]
    device: ProfiledDevice
    torch_device: torch.device
    compute_type: ComputeType
    quick: bool = False
    formats: tuple[FormatName, ...] = FORMATS
    more: tuple[Work, ...] = ()  # beside the grid: what a fit is to be judged by
    company: int = 0  # processes that decode meanwhile, each on a core of its own
    passes: int = PASSES
    kv_bits: int = 16

    @property
    def key(self) -> dict[str, Any]:
        """Everything that would make another measurement differ. Formats are measured each for itself: what is noted of one is good for any survey."""
        device = {name: getattr(self.device, name) for name in self.device.__struct_fields__}
        place = {"device": device, "on": str(self.torch_device), "computeType": self.compute_type}
        sizes = {
            "fields": self.fields,
            "quick": self.quick,
            "kvBits": self.kv_bits,
            "more": list(map(astuple, self.more)),
            "company": self.company,
        }
        return {"version": LATENCY_PROFILE_VERSION, **place, **sizes}


@dataclass
class Survey:
    """`progress(done, total, what)` is called after every work of every pass; `between` with the profile of each pass but the last and
    those before it: what a profile is to be judged by can meet the same hours of a machine. `base`: a profile of the same subject with none of its
    formats, to be extended.
    """

    subject: Subject
    notes: Notes
    progress: Callable[[int, int, str], None]
    between: Callable[[LatencyProfile], None] | None = None
    base: LatencyProfile | None = None
    _models: ShallowModels = field(default_factory=lambda: ShallowModels(Path()))
    _per_token: dict[str | int, float] = field(default_factory=dict)
    _done: int = 0
    _total: int = 0
    _model: ProfiledModel | None = None
    _kernels: dict[FormatName, list[KernelRange]] = field(default_factory=dict)
    _layers: dict[FormatName, int] = field(default_factory=dict)

    def run(self) -> LatencyProfile:
        """Minutes. Raises InputError for a model whose layers are not alike, or not those of `base`."""
        with tempfile.TemporaryDirectory() as folder:
            self._layers = {name: self._depth(name) for name in self.subject.formats}
            depth = max(self._layers.values()) + 1
            self._models = make_models(self.subject.fields, depth, Path(folder), self.subject.formats)
            works = self._works
            passes = self.subject.passes
            beside = len(DECODE_SEQUENCES) * self._lacks_head + len(LOADS) * self._lacks_handling
            self._total = passes * (len(works) * len(self.subject.formats) + beside)
            for number in range(passes):
                if number and self.between:
                    self.between(self._profile(works))
                for name in self.subject.formats:
                    with self._company(name):
                        self._pass(name, works, number)
                if self._lacks_head:
                    self._head_pass(number)
                if self._lacks_handling:
                    self._handling_pass(number)
        return self._profile(works)

    @property
    def _lacks_head(self) -> bool:
        return self.base is None or not self.base.head

    @property
    def _lacks_handling(self) -> bool:
        return self.base is None or not self.base.handling

    def _company(self, name: FormatName) -> AbstractContextManager[None]:
        subject = self.subject
        return in_company(subject.company, subject.fields, name, subject.compute_type, subject.kv_bits)

    @property
    def _works(self) -> list[Work]:
        return sorted({*grid(self._limits), *filter(self._limits.allow, self.subject.more)}, key=cost_order)

    def _pass(self, name: FormatName, works: Sequence[Work], number: int) -> None:
        """Few and many rows each on the stage that suits them."""
        for few in (True, False):
            chosen = [work for work in works if (work.total_tokens <= MANY_ROWS) is few]
            depth = self._layers[name] if few else min(self._layers[name], FEW_LAYERS)
            with self._stage((name,) * depth) as stage:
                self._look(name, stage)
                for work in chosen:
                    self._measure(stage, _point_name(name, work), work, number)

    def _head_pass(self, number: int) -> None:
        with self._stage(("dense",), head=True) as stage:
            for sequences in DECODE_SEQUENCES:
                self._measure(stage, ("head", sequences), Work("decode", sequences, 1, 0), number)

    def _handling_pass(self, number: int) -> None:
        """On the processor, whatever computes the layers."""
        with idle_pipeline(self._sizes.hidden, self.subject.compute_type, MAX_STEP_TOKENS) as pipeline:
            for load in LOADS:
                self._done += 1
                if self.notes.passes(_handling_name(load)) <= number:
                    self.notes.add(_handling_name(load), [tuple(pipeline.handle(load))])
                self.progress(self._done, self._total, " ".join(map(str, _handling_name(load))))

    @contextmanager
    def _stage(self, formats: tuple[FormatName, ...], *, head: bool = False) -> Iterator[ProfiledStage]:
        limits = self._limits
        first = max(self._layers.values()) + 1 - len(formats) if head else 0
        spec = StageSpec(
            formats,
            self.subject.compute_type,
            limits.cached_tokens,
            limits.positions,
            head=head,
            first=first,
            kv_bits=self.subject.kv_bits,
        )
        with torch.inference_mode():
            yield ProfiledStage(self._models.folder(formats[0]), spec, self.subject.torch_device)

    def _measure(self, stage: ProfiledStage, name: Name, work: Work, number: int) -> None:
        self._done += 1
        if self._fast_enough(name, work):
            if self.notes.passes(name) <= number:
                stage.prepare(work)
                self.notes.add(name, [(taken.layer, taken.before, taken.after) for taken in _runs(stage, work)])
            self._per_token[name[0]] = self.notes.quantile(name, TYPICAL)[0] / work.total_tokens
        self.progress(self._done, self._total, " ".join(str(part) for part in name))

    def _fast_enough(self, name: Name, work: Work) -> bool:
        """By what a token took in the last work, which had about as many."""
        return self._per_token.get(name[0], 0.0) * work.total_tokens * FEW_LAYERS < MOST_SECONDS

    def _look(self, name: FormatName, stage: ProfiledStage) -> None:
        """Note the shapes, and which kernel runs for how many rows."""
        self._model = self._model or self._checked(shapes_of(stage.model, self.subject.fields))
        ranges: list[KernelRange] = []
        for rows in (*self._padded_sizes, MAX_STEP_TOKENS):
            kernel = stage.kernels(rows)
            if ranges and ranges[-1].kernel == kernel:
                ranges.pop()
            ranges.append(KernelRange(format=name, kernel=kernel, most_rows=rows))
        self._kernels[name] = ranges

    def _checked(self, model: ProfiledModel) -> ProfiledModel:
        """Before minutes are spent on points that go nowhere."""
        if self.base is not None and self.base.model != model:
            raise InputError(
                f"the profile to extend is of {self.base.model.architecture} layers {self.base.model.hidden_size} wide, this model's are "
                f"{model.architecture} {model.hidden_size} wide and differ: write to another file"
            )
        return model

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes.of(self.subject.fields)

    @cached_property
    def _limits(self) -> Limits:
        token = max(self._layers.values()) * self._sizes.cached_token_bytes(
            self.subject.kv_bits, self.subject.compute_type
        )
        positions = min(self._sizes.positions or MOST_POSITIONS, MOST_POSITIONS)
        return Limits(positions, min(MOST_CACHE_BYTES // token, MOST_CACHED_TOKENS), self.subject.quick)

    def _depth(self, name: FormatName) -> int:
        """Layers of a format that are gone through in turn."""
        size = self._sizes.layer_bytes(name, self.subject.compute_type)
        beyond = copies_beyond_cache(size, self.subject.torch_device)
        return min(self._sizes.depth, max(beyond, FEW_LAYERS if size < MOST_CACHE_BYTES else 1))

    def _profile(self, works: Sequence[Work]) -> LatencyProfile:
        assert self._model is not None
        sizes, multiple = row_sizes(self._padded_sizes)
        points = [
            self._point(name, work)
            for name in self.subject.formats
            for work in works
            if self.notes.passes(_point_name(name, work))
        ]
        found = LatencyProfile(
            version=LATENCY_PROFILE_VERSION,
            device=self.subject.device,
            compute_type=self.subject.compute_type,
            kv_bits=self.subject.kv_bits,
            model=self._model,
            layers=self._layers,
            row_sizes=sizes,
            row_multiple=multiple,
            max_step_tokens=MAX_STEP_TOKENS,
            kernels=tuple(each for ranges in self._kernels.values() for each in ranges),
            points=tuple(points),
            head=tuple(map(self._head, DECODE_SEQUENCES)) if self._lacks_head else (),
            handling=tuple(map(self._handling, LOADS)) if self._lacks_handling else (),
            stored=dict(self._models.stored),
            company=self.subject.company,
        )
        return self.base.with_formats(found) if self.base else found

    @cached_property
    def _padded_sizes(self) -> list[int]:
        counts = range(1, _ROWS_LOOKED_AT + 1)
        if self.subject.torch_device.type != "cpu" or not pads(COMPUTE_DTYPES[self.subject.compute_type]):
            return [*counts]
        return sorted({padded_rows(count) for count in counts})

    def _head(self, sequences: int) -> HeadPoint:
        return HeadPoint(sequences, self.notes.quantile(("head", sequences), TYPICAL)[2])

    def _handling(self, load: Load) -> HandlingPoint:
        seconds, sequences, tokens = self.notes.quantile(_handling_name(load), TYPICAL)
        return HandlingPoint(sequences, tokens, seconds)

    def _point(self, name: FormatName, work: Work) -> LatencyPoint:
        layer, before, after = self.notes.quantile(_point_name(name, work), TYPICAL)
        rows = next((size for size in self._padded_sizes if size >= work.total_tokens), MAX_STEP_TOKENS)
        kernel = next(each.kernel for each in self._kernels[name] if rows <= each.most_rows)
        return LatencyPoint(
            name, kernel, work.phase, work.sequences, work.tokens, work.past, layer, max(0.0, before + after)
        )


def _handling_name(load: Load) -> Name:
    return "handling", *load


def _point_name(name: str, work: Work) -> Name:
    return name, work.phase, work.sequences, work.tokens, work.past


def _runs(stage: ProfiledStage, work: Work) -> list[Taken]:
    """A few runs, after one that is thrown away unless it is slow enough to speak for itself: without kernels that were made in it."""
    makes_kernels = padded_rows(work.total_tokens) not in stage.row_numbers
    first, begun = stage.run(work), stage.clock()
    total = first.layer * len(stage.spec.formats)
    runs = [first] if total > SLOW_SECONDS and not makes_kernels else []
    while not runs or (len(runs) < MOST_RUNS and stage.clock() - begun + total < PASS_SECONDS):
        runs.append(stage.run(work))
    return runs
