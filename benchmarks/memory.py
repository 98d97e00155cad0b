"""Predicted against measured memory: fresh slots that load a slice and serve the worst that its plan allows.

`python -m benchmarks.memory [--json FILE] [--points FILE.csv] [--picture FILE.svg]`, some ten minutes on two cores.
Measured is the peak of private memory (sampled from outside while the slot works, and the kernel's own mark while it serves) beyond
what the same slot held before its first role; predicted is the plan's total without the framework's overhead. Those called calibration were looked
at first; the model of the heap was settled with all of them in view.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Table

from benchmarks.memory_cases import ARCHITECTURES, THREADS, Architecture, Case, plan_of
from benchmarks.rows import Row, run
from benchmarks.scatter import Point, scatter_svg
from benchmarks.slots import SlotProcess, slot_processes
from strata_planner.contract.control import GetStatus
from strata_planner.contract.plan import Plan, Stage
from strata_planner.contract.rows import padded_rows
from strata_planner.question.model import Model
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy

GOAL = 0.03
_SAMPLE_SECONDS = 0.001  # merged experts are there twice for some 10 ms
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20
_TOKENS = 1000  # prompts use the first tokens of any vocabulary


@dataclass(frozen=True)
class Slice:
    """One slot's slice: what the plan said and what the kernel saw."""

    what: str
    group: str  # "calibration", "unseen", "small"
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


class Mark:
    """The kernel's high-water mark of one process's memory, which no busy machine can miss (proc_pid_status(5), proc_pid_clear_refs(5)).

    It counts pages of mapped files too: take it while no checkpoint is mapped.
    """

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def reset(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    @property
    def private_bytes(self) -> int:
        """The most since `reset`, without the files that are mapped now."""
        lines = (line.partition(":") for line in (self._folder / "status").read_text().splitlines())
        sizes = {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}
        return sizes["VmHWM"] - sizes["RssFile"] - sizes["RssShmem"]


class PeakWatch:
    """Samples the private memory of processes until it is left; the peak of each by name.

    Resident pages that belong to no file (proc_pid_statm(5)): counters, which are read in microseconds, where the dirty pages that slots tell
    of are counted in milliseconds. The two agree to a page.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.peaks = dict.fromkeys(pids, 0)
        self._counters = {name: Path(f"/proc/{pid}/statm") for name, pid in pids.items()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            for name, counters in self._counters.items():
                _, resident, shared, *_ = map(int, counters.read_text().split())
                self.peaks[name] = max(self.peaks[name], (resident - shared) * _PAGE_BYTES)


def serve_the_worst(leader: LeaderClient, case: Case) -> None:
    """Every number of rows that a step can have, then all sequences at full length, ending one after the other."""
    sizes = sorted({padded_rows(rows) for rows in range(1, case.micro_batch.max_step_tokens + 1)})
    for rows in sizes:
        leader.generate([greedy(f"rows {rows}", _prompt(rows, min(rows, case.prompt)), 1)])
    answers = [max(2, case.answer - place * case.answer // case.sequences) for place in range(case.sequences)]
    leader.generate(
        [greedy(f"sequence {place}", _prompt(place, case.prompt), answer) for place, answer in enumerate(answers)]
    )


def _prompt(seed: int, length: int) -> list[int]:
    return [(7 * seed + place) % _TOKENS for place in range(length)]


def measure_case(architecture: Architecture, folder: Path, case: Case) -> list[Slice]:
    plan = plan_of(case, Model.from_folder(folder), str(folder))
    with slot_processes(plan, THREADS) as slots:
        peaks = _peaks(plan, slots, case)
    group = "small" if case.small else "calibration" if case.calibration else "unseen"
    return [
        Slice(
            what=f"{architecture.name}: {_describe(stage, case)}",
            group=group,
            predicted_bytes=stage.memory.total_bytes,
            measured_bytes=peaks[stage.slot],
        )
        for stage in plan.replicas[0].stages
    ]


def _peaks(plan: Plan, slots: Mapping[str, SlotProcess], case: Case) -> dict[str, int]:
    idle = {name: slot.ask(GetStatus()).idle_bytes for name, slot in slots.items()}
    client = PipelineClient(slots)
    marks = {name: Mark(slot.process.pid) for name, slot in slots.items()}
    with PeakWatch({name: slot.process.pid for name, slot in slots.items()}) as watch:
        leader = client.serve(plan)
        for mark in marks.values():
            mark.reset()
        serve_the_worst(leader, case)
    return {name: max(peak, marks[name].private_bytes) - idle[name] for name, peak in watch.peaks.items()}


def _describe(stage: Stage, case: Case) -> str:
    bits = " ".join(f"{len(list(group))}x{value}" for value, group in itertools.groupby(stage.bits))
    ends = "embedding, " * stage.embedding + "head, " * stage.head
    return f"{ends}{bits} bits, {case.compute_type}, {case.sequences} x {case.length} tokens"


def measure_slices(architectures: Iterable[Architecture]) -> list[Slice]:
    slices: list[Slice] = []
    for architecture in architectures:
        with tempfile.TemporaryDirectory() as folder:
            model = architecture.make(Path(folder) / "model")
            for case in architecture.cases:
                measured = measure_case(architecture, model, case)
                for one in measured:
                    tell(one)
                slices += measured
    return slices


def tell(one: Slice) -> None:
    """Progress, on the way: the whole takes minutes."""
    sizes = f"{one.predicted_bytes / _MIB:7.1f} {one.measured_bytes / _MIB:7.1f}"
    print(f"{sizes} {one.error:+6.1%} {one.group:11} {one.what}", file=sys.stderr, flush=True)


def table(slices: Sequence[Slice]) -> Table:
    shown = Table(title="memory of fresh slots beyond idle ones, MiB", title_justify="left")
    for column in ("slice", "group"):
        shown.add_column(column)
    for column in ("predicted", "measured", "error"):
        shown.add_column(column, justify="right")
    for one in slices:
        sizes = (f"{value / _MIB:.1f}" for value in (one.predicted_bytes, one.measured_bytes))
        shown.add_row(one.what, one.group, *sizes, f"{one.error:+.1%}")
    return shown


def summary(slices: Sequence[Slice]) -> str:
    lines = []
    for group in dict.fromkeys(one.group for one in slices):
        errors = [abs(one.error) for one in slices if one.group == group]
        lines.append(f"{group}: {len(errors)} slices, mean {statistics.mean(errors):.2%}, worst {max(errors):.2%}")
    return "\n".join(lines)


def row(name: str, slices: Sequence[Slice], goal: float) -> Row:
    """The worst error of all slices but the small ones."""
    judged = [one for one in slices if one.group != "small"]
    worst = max(judged, key=lambda one: abs(one.error))
    mean = statistics.mean(abs(one.error) for one in judged)
    return Row(
        name=name,
        value=abs(worst.error),
        unit=f"worst error of {len(judged)} slices, mean {mean:.2%}",
        peer="measured bytes of the worst slice",
        peer_value=worst.measured_bytes,
        goal=goal,
        lower_is_better=True,
    )


def show(slices: Sequence[Slice]) -> None:
    Console(width=150).print(table(slices))
    print(summary(slices))


def measure() -> list[Row]:
    """The first model's 16- and 8-bit slices alone, for `benchmarks.pipeline`."""
    first = ARCHITECTURES[0]
    few = Architecture(first.name, first.model_type, first.config, first.cases[:2])
    slices = measure_slices([few])
    show(slices)
    return [row("memory", slices, goal=0.05)]


def measure_all(points: Path | None, picture: Path | None) -> list[Row]:
    slices = measure_slices(ARCHITECTURES)
    show(slices)
    if points:
        write_points(points, slices)
    if picture:
        drawn = [Point(one.what, one.group, one.predicted_bytes / _MIB, one.measured_bytes / _MIB) for one in slices]
        picture.write_text(scatter_svg(drawn, "Memory of slots: predicted and measured", "MiB", GOAL), encoding="utf-8")
    return [row("memory_error", slices, goal=GOAL)]


def write_points(file: Path, slices: Sequence[Slice]) -> None:
    """CSV, or JSON where the file is called so."""
    listed = [asdict(one) | {"error": one.error} for one in slices]
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
        return
    with file.open("w", encoding="utf-8", newline="") as target:
        writer = csv.DictWriter(target, fieldnames=list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", add_help=False)
    parser.add_argument("--points", type=Path)
    parser.add_argument("--picture", type=Path)
    chosen, rest = parser.parse_known_args(arguments)
    run("memory", lambda: measure_all(chosen.points, chosen.picture), rest)


if __name__ == "__main__":
    main()
