"""Predicted against measured time of layers that ranks share: a profile of two ranks on workloads that it has not seen.

Part of `benchmarks.costs`; alone: `python -m benchmarks.latency_ranks [--json FILE]`, three minutes on two quiet cores. A rank has a core of its own:
three or four of them on two cores would wait for their turns, which no plan for as many cores means. The 246M shape of `benchmarks.pipeline`.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import SHAPES
from benchmarks.rows import Row, run
from strata_planner.contract.formats import FormatName
from strata_planner.contract.latencies import LatencyPoint, LatencyProfile, ProfiledDevice, SharedLayers
from strata_planner.costs.communication import hidden_states_bytes, layer_sums_seconds
from strata_planner.costs.fitted import FittedLatency, chunk_of
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Rates
from strata_planner.question.catalogue import CPU, catalogue
from strata_planner.question.model import Model
from strata_runtime.device import processor_name
from strata_runtime.measuring.profiling.fields import read_fields
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.notes import Notes
from strata_runtime.measuring.profiling.shared_layers import SharedSubject, measure_shared
from strata_runtime.measuring.profiling.survey import Subject, Survey

RANKS = 2
FORMATS: tuple[FormatName, ...] = ("dense",)
UNSEEN = (
    *(Work("decode", sequences, 1, past) for sequences in (3, 5, 10, 20) for past in (100, 384)),
    *(
        Work("prefill", *work)
        for work in ((1, 100, 0), (1, 300, 0), (1, 700, 0), (3, 50, 0), (5, 90, 0), (1, 200, 384))
    ),
)


def alone(fields: dict[str, Any]) -> LatencyProfile:
    """A short profile of one rank: what those of several stand beside."""
    torch.set_num_threads(1)
    device = ProfiledDevice("cpu", processor_name(), 1, metadata.version("torch"))
    subject = Subject(fields, device, torch.device("cpu"), "bfloat16", quick=True, formats=FORMATS, passes=1)
    with tempfile.TemporaryDirectory() as folder:
        notes = Notes(Path(folder) / "notes", subject.key)
        found = Survey(subject, notes, _quiet).run()
        notes.close(done=True)
    return found


def told(source: FittedLatency, model: Model, rates: Rates, point: LatencyPoint) -> float:
    """Seconds of a layer as a plan has them: a rank's part and the sums."""
    phase = chunk_of(point)
    part = source.layer(sharded(model.layers[0], RANKS), point.format, rates, phase)
    assert part is not None, "the profile knows this stage"
    size = hidden_states_bytes(model, phase.total_tokens, rates.compute_type)
    return part.seconds + layer_sums_seconds(RANKS, size)


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        fields, model = read_fields(folder), Model.from_folder(folder)
    base = alone(fields)
    subject = SharedSubject(fields, RANKS, 1, "bfloat16", more=UNSEEN)
    points = measure_shared(subject, FORMATS, base, _quiet)
    seen = tuple(point for point in points if _work(point) not in UNSEEN)
    source = FittedLatency(base.with_shared(SharedLayers(RANKS, seen)))
    rates = Rates(catalogue().profile(CPU), "bfloat16", 16, CPU)  # what was measured needs none of its figures
    judged = [point for point in points if _work(point) in UNSEEN]
    return [_row(judged, [told(source, model, rates, point) / point.layer_seconds - 1 for point in judged])]


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPES}


def _row(points: Sequence[LatencyPoint], errors: Sequence[float]) -> Row:
    table = Table(title=f"a layer of {RANKS} ranks on workloads that the profile has not seen", title_justify="left")
    for column in ("format", "workload", "ms, measured", "error"):
        table.add_column(column)
    for point, error in zip(points, errors, strict=True):
        work = f"{point.sequences} x {point.tokens} after {point.past}"
        table.add_row(point.format, work, f"{point.layer_seconds * 1e3:.3f}", f"{error:+.1%}")
    Console(width=100).print(table)
    mean, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))
    unit = f"mean of {len(errors)} unseen workloads of {RANKS} ranks, worst {worst:.1%}"
    return Row("latency_error_ranks", mean, unit, goal=0.08, lower_is_better=True)


def _work(point: LatencyPoint) -> Work:
    return Work(point.phase, point.sequences, point.tokens, point.past)


def _quiet(_done: int, _total: int, _what: str) -> None:
    pass


if __name__ == "__main__":
    run("latency_ranks", measure, sys.argv[1:])
