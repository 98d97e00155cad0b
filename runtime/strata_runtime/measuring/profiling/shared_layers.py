"""Layers of a stage that several ranks share, timed as layers of one device are: micro-batches of both phases, format by format, sums included.

Called by `strata profile --ranks` and by benchmarks. The grid is a coarse one: ranks compute what they hold of a cached context too, where one device
only says that it is there.
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata_planner.contract.formats import ComputeType, FormatName
from strata_planner.contract.frames import Segment
from strata_planner.contract.latencies import LatencyPoint, LatencyProfile
from strata_runtime.measuring.profiling.grid import Limits, Work, cost_order
from strata_runtime.measuring.profiling.model import Sizes
from strata_runtime.measuring.profiling.ranked import ranked_stage
from strata_runtime.measuring.profiling.stage import PAGE_TOKENS, StageSpec
from strata_runtime.measuring.profiling.stored import make_models
from strata_runtime.measuring.timing import copies_beyond_cache
from strata_runtime.scheduler.blocks import OwnBlocks

DECODE_SEQUENCES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
DECODE_PASTS = (32, 512)
PREFILL_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024)
PREFILL_SEQUENCES = (1, 4)
CONTINUED = ((64, 512), (256, 256), (512, 512))  # new, past
FEW_LAYERS = 3
PASSES = 3
MOST_RUNS, PASS_SECONDS = 12, 0.15  # of a work in a pass


@dataclass(frozen=True)
class SharedSubject:
    """What is measured: a model's config.json fields, over so many ranks of so many threads each."""

    fields: Mapping[str, Any]
    ranks: int
    threads: int
    compute_type: ComputeType
    kv_bits: int = 16
    quick: bool = False
    more: tuple[Work, ...] = ()  # beside the grid: what a fit is to be judged by

    @property
    def works(self) -> list[Work]:
        positions = Sizes.of(self.fields).positions or max(PREFILL_TOKENS)
        limits = Limits(positions, max(DECODE_SEQUENCES) * max(DECODE_PASTS) * 2, self.quick)
        return sorted({work for work in (*_grid(quick=self.quick), *self.more) if limits.allow(work)}, key=cost_order)


def _grid(*, quick: bool) -> Iterator[Work]:
    for sequences in DECODE_SEQUENCES:
        yield from (Work("decode", sequences, 1, past) for past in DECODE_PASTS)
    for total in PREFILL_TOKENS:
        if not quick or total <= max(PREFILL_TOKENS) // 2:
            yield from (Work("prefill", each, total // each, 0) for each in PREFILL_SEQUENCES)
    yield from (Work("prefill", 1, tokens, past) for tokens, past in CONTINUED)


def measure_shared(
    subject: SharedSubject,
    formats: Sequence[FormatName],
    profile: LatencyProfile,
    progress: Callable[[int, int, str], None],
) -> list[LatencyPoint]:
    """`profile`: of one such device, whose kernels these are. Raises InputError for a model, or a format, that ranks cannot share."""
    sizes, points = Sizes.of(subject.fields), list[LatencyPoint]()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        depth = {name: _depth(sizes, name, subject.compute_type) for name in formats}
        models = make_models(subject.fields, max(depth.values()), Path(folder), formats)
        for place, name in enumerate(formats):
            taken = _seconds(subject, models.folder(name), (name,) * depth[name])
            for work, seconds in taken.items():
                kernel = profile.kernel(name, profile.rows(work.total_tokens))
                where = (work.phase, work.sequences, work.tokens, work.past)
                points.append(LatencyPoint(name, kernel, *where, statistics.median(seconds), 0.0))
            progress(place + 1, len(formats), f"{name} over {subject.ranks} ranks")
    return points


def _depth(sizes: Sizes, name: FormatName, compute_type: ComputeType) -> int:
    """Layers that are beyond the last cache, which ranks of one machine share, or as many as the model has."""
    beyond = copies_beyond_cache(sizes.layer_bytes(name, compute_type), torch.device("cpu"))
    return min(sizes.depth, max(beyond, FEW_LAYERS))


def _cached_tokens(work: Work) -> int:
    """In whole pages."""
    return work.sequences * -(-work.longest // PAGE_TOKENS) * PAGE_TOKENS


def _seconds(subject: SharedSubject, model: Path, formats: tuple[FormatName, ...]) -> dict[Work, list[float]]:
    """Of a layer; passes lie apart, so that a busy moment does not meet all runs of a work."""
    works = subject.works
    longest, cached = max(each.longest for each in works), max(map(_cached_tokens, works))
    spec = StageSpec(formats, subject.compute_type, cached, longest, kv_bits=subject.kv_bits)
    taken: dict[Work, list[float]] = {work: [] for work in works}
    with ranked_stage(model, subject.ranks, spec, subject.threads) as stage:
        for _ in range(PASSES):
            for work in works:
                before, segments = _steps(work)
                likely = min(taken[work], default=math.inf) * stage.layers
                runs = max(1, min(MOST_RUNS, int(PASS_SECONDS / likely)))
                taken[work] += stage.seconds("megatron", segments, 1 + runs, before)[1:]
    return taken


def _steps(work: Work) -> tuple[list[Segment], list[Segment]]:
    """What is cached before, sequence by sequence, and the step."""
    blocks = OwnBlocks(sum(-(-(each.start + each.length) // PAGE_TOKENS) for each in work.segments()), PAGE_TOKENS)
    cached = [Segment(each.sequence, 0, each.start, 0) for each in work.segments() if each.start]
    return blocks.deal(cached), blocks.deal(work.segments())
