"""Predicted against measured time: layers on workloads that the profile has not seen, and whole plans of mixed bits.

`python -m benchmarks.costs [--json FILE] [--quick] [--picture FILE.svg]`: some 7 minutes on two quiet cores (--quick: 4, on a
shorter grid), and then what `benchmarks.latency_ranks`, `memory`, `memory_ranks` and `sensitivity` take, whose rows follow. A profile of a
random-weight Llama is measured, and in the same passes the unseen workloads, so that both meet the same machine. Then the
planner, with that profile as its source, plans two stages under memory limits that force lower and mixed precisions; the plans
run on slots of one thread and one core each. Predicted is what the planner's simulator makes of the plan, the profile and the
load, which sees nothing of the run; the plan's own figure, in closed form, stands beside it.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import latency_ranks, memory, memory_ranks, sensitivity
from benchmarks.pipeline import SHAPES
from benchmarks.rows import Row, run
from benchmarks.scatter import Point, scatter_svg
from benchmarks.served_plans import CASES, Ran, plan_of, serve, show_plans
from strata_planner.contract.latencies import LatencyPoint, LatencyProfile, ProfiledDevice
from strata_planner.costs.fitted import FittedLatency, chunk_of
from strata_planner.costs.regression import Array, relative_fit
from strata_runtime.device import processor_name
from strata_runtime.measuring.profiling.fields import read_fields
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.notes import Notes
from strata_runtime.measuring.profiling.survey import Subject, Survey
from strata_runtime.model.random_model import make_random_model

UNSEEN = (
    *(Work("decode", sequences, 1, past) for sequences in (3, 5, 7, 10, 20) for past in (100, 384, 768)),
    *(
        Work("prefill", sequences, tokens, past)
        for sequences, tokens, past in (
            (1, 100, 0),
            (1, 300, 0),
            (1, 700, 0),
            (3, 50, 0),
            (3, 200, 0),
            (5, 90, 0),
            (7, 40, 0),
            (7, 130, 0),
            (1, 200, 384),
            (1, 400, 768),
        )
    ),
)


@dataclass(frozen=True)
class Told:
    """One point, predicted and measured, in seconds."""

    name: str
    group: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def survey(model: Path, *, quick: bool) -> tuple[LatencyProfile, list[LatencyPoint]]:
    """The profile, and what the unseen workloads took in the same passes."""
    torch.set_num_threads(1)
    device = ProfiledDevice("cpu", processor_name(), 1, metadata.version("torch"))
    subject = Subject(read_fields(model), device, torch.device("cpu"), "bfloat16", quick, more=UNSEEN)
    with tempfile.TemporaryDirectory() as folder:
        notes = Notes(Path(folder) / "notes", subject.key)
        whole = Survey(subject, notes, _say).run()
        notes.close(done=True)
    unseen = [point for point in whole.points if _work(point) in UNSEEN]
    seen = tuple(point for point in whole.points if _work(point) not in UNSEEN)
    return msgspec.structs.replace(whole, points=seen), unseen


def _work(point: LatencyPoint) -> Work:
    return Work(point.phase, point.sequences, point.tokens, point.past)


def _say(done: int, total: int, what: str) -> None:
    if done % 100 == 0 or done == total:
        sys.stderr.write(f"\r{done} of {total} measurements ({what})".ljust(70) + ("\n" if done == total else ""))


def compare(source: FittedLatency, unseen: Sequence[LatencyPoint]) -> list[Told]:
    told = []
    for point in unseen:
        seconds, _ = source.step_layer(point.format, (chunk_of(point),))
        name = f"{point.sequences} x {point.tokens} after {point.past}"
        told.append(Told(name, f"{point.format} {point.phase}", seconds, point.layer_seconds))
    return told


def show_layers(told: Sequence[Told], console: Console) -> None:
    table = Table(title="a layer on workloads that the profile has not seen", title_justify="left")
    for column in ("", "workloads", "mean error", "worst", "of"):
        table.add_column(column)
    for group in dict.fromkeys(each.group for each in told):
        mine = [each for each in told if each.group == group]
        worst = max(mine, key=lambda each: abs(each.error))
        mean = statistics.mean(abs(each.error) for each in mine)
        table.add_row(group, str(len(mine)), f"{mean:.1%}", f"{worst.error:+.1%}", worst.name)
    console.print(table)


def draw(told: Sequence[Told], ran: Sequence[Ran], file: Path) -> None:
    """Layers and whole plans, seconds predicted over measured, in one picture."""
    points = [Point(f"{each.group}, {each.name}", each.group, each.predicted, each.measured) for each in told]
    points += [
        Point(f"{each.name}, TTFT", "plans: TTFT", each.simulated.ttft_seconds, each.measured.ttft_seconds)
        for each in ran
    ]
    points += [
        Point(
            f"{each.name}, a token",
            "plans: seconds a token",
            *(1 / one.tokens_per_second for one in (each.simulated, each.measured)),
        )
        for each in ran
    ]
    file.write_text(
        scatter_svg(points, "Predicted and measured time, on unseen workloads", "s", 0.05), encoding="utf-8"
    )


def single_fit_errors(profile: LatencyProfile, unseen: Sequence[LatencyPoint]) -> list[float]:
    """The paper's way as it stands, one fit per format and phase; prompts that go on after a cached part it does not know."""
    errors = []
    for name, phase in {(point.format, point.phase) for point in unseen}:
        seen, judged = (
            [
                point
                for point in points
                if (point.format, point.phase) == (name, phase) and (phase == "decode" or not point.past)
            ]
            for points in (profile.points, unseen)
        )
        coefficients = relative_fit(_paper_terms(seen), np.array([point.layer_seconds for point in seen]))
        told = _paper_terms(judged) @ coefficients
        errors += [abs(one / point.layer_seconds - 1) for one, point in zip(told, judged, strict=True)]
    return errors


def _paper_terms(points: Sequence[LatencyPoint]) -> Array:
    """LLM-PQ, section 4.3: 1, v, s, v s, v s^2 prefilling; 1, v, v (t + s), t + s decoding."""
    terms = []
    for point in points:
        v, s = point.sequences, point.tokens if point.phase == "prefill" else point.past + 1
        terms.append([1, v, s, v * s, v * s * s if point.phase == "prefill" else 0])
    return np.array(terms, dtype=float)


def measure(*, quick: bool, picture: Path | None) -> list[Row]:
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder) / "model", "llama", dtype=torch.bfloat16, **SHAPES)
        profile, unseen = survey(model, quick=quick)
        source = FittedLatency(profile)
        told = compare(source, unseen)
        show_layers(told, console)
        ran = [serve(case, *plan_of(case, model, source), 3) for case in CASES]
    show_plans(ran, console)
    if picture is not None:
        draw(told, ran, picture)
    return rows_of(told, ran, statistics.mean(single_fit_errors(profile, unseen)))


def rows_of(told: Sequence[Told], ran: Sequence[Ran], single_fit: float) -> list[Row]:
    def plans(name: str, errors: Sequence[float], goal: float | None = None) -> Row:
        mean = statistics.mean(map(abs, errors))
        worst = max(map(abs, errors))
        return Row(name, mean, f"mean of {len(errors)} plans, worst {worst:.1%}", goal=goal, lower_is_better=True)

    worst = max(abs(each.error) for each in told)
    layers = statistics.mean(abs(each.error) for each in told)
    unit = f"mean of {len(told)} unseen workloads, worst {worst:.1%}"
    peer = "one fit per phase, as in LLM-PQ"
    return [
        Row("latency_error", layers, unit, peer, single_fit, goal=0.05, lower_is_better=True),
        plans("end_to_end_error", [each.error for each in ran], 0.10),
        plans("end_to_end_ttft_error", [each.ttft_error for each in ran]),
        plans("end_to_end_busy_error", [each.busy_error for each in ran]),
        plans("end_to_end_closed_form_error", [each.closed_form_error for each in ran]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", add_help=False)
    parser.add_argument("--quick", action="store_true", help="steps of at most 512 tokens in the profile")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw predicted over measured")
    chosen, rest = parser.parse_known_args()
    run("costs", lambda: measure_all(quick=chosen.quick, picture=chosen.picture), rest)


def measure_all(*, quick: bool, picture: Path | None) -> list[Row]:
    """Time here; memory and quality by the benchmarks that are also commands of their own."""
    rows = measure(quick=quick, picture=picture)
    return [
        *rows,
        *latency_ranks.measure(),
        *memory.measure_all(None, None),
        *memory_ranks.measure(),
        *sensitivity.measure(sensitivity.TOKENS, sensitivity.MEASURED_TOKENS),
    ]


if __name__ == "__main__":
    main()
