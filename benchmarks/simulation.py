"""The simulator against the runtime: the same plan, the same requests, the same moments of arrival.

`python -m benchmarks.simulation [--json FILE]`, some 5 minutes. Two stages of one thread and one core each serve a random-weight
Llama of 246 million parameters at 8 and 16 bits. Requests of mixed lengths come as a Poisson process at half of what the pipeline can do,
where throughput is the arrivals' rate, and all at once, where the system decides it. The simulator has the plan and a latency
profile of this machine, one core measured while the other works, and sees nothing of the runs.

The speed of a virtual machine drifts by tenths within minutes. So runs and passes of the profile take turns, each run between two
passes; the profile tells the typical seconds of its passes, and the run in the middle is what they are compared with.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Self

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import make_model
from benchmarks.rows import Row, run
from benchmarks.served_plans import loopback
from benchmarks.slots import slot_processes
from strata_planner.contract.frames import Segment
from strata_planner.contract.latencies import LatencyPoint, LatencyProfile, ProfiledDevice
from strata_planner.contract.plan import Plan
from strata_planner.costs.fitted import FittedLatency
from strata_planner.costs.latency import Latencies
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanRequest, make_plan
from strata_planner.simulate import Outcome, ReplicaModel, Request, Served, at_once, fleet, poisson, simulate
from strata_planner.simulate.outcome import METRICS, Metric
from strata_runtime.device import processor_name
from strata_runtime.measuring.profiling.fields import read_fields
from strata_runtime.measuring.profiling.grid import Work
from strata_runtime.measuring.profiling.notes import Notes
from strata_runtime.measuring.profiling.survey import Subject, Survey
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy

PROMPTS, ANSWERS = (16, 40, 96, 200), (8, 24, 48, 80)
COUNT, SEED, LOAD, RUNS = 96, 7, 0.5, 3
OPEN, CLOSED = f"Poisson at {LOAD:.0%} of capacity", "all at once"
GOAL = 0.10
_MEMORY_BYTES = 290 << 20  # of each stage: some layers fit at 16 bits, the others at 8
_VOCABULARY = 1000


@dataclass(frozen=True)
class Case:
    name: str
    measured: Outcome
    simulated: Outcome

    @property
    def figures(self) -> dict[str, tuple[float, float]]:
        """Name -> measured, simulated."""
        found = {"tokens/s": (self.measured.tokens_per_second, self.simulated.tokens_per_second)}
        for metric in METRICS:
            for percent in (50, 90):
                found[f"{metric} p{percent}"] = self._pair(metric, percent)
        return found

    def _pair(self, metric: Metric, percent: float) -> tuple[float, float]:
        measured, simulated = (each.percentile(metric, percent) for each in (self.measured, self.simulated))
        assert measured is not None, "every request of the trace is served"
        assert simulated is not None, "every request of the trace is served"
        return measured, simulated


class Unlike(Work):
    """Decoding sequences of unlike lengths, 0.3 to 1.7 times `past`, as a continuous batch has them. Attention takes them in
    groups, which the profile's own points, all of one length, do not meet.
    """

    @property
    def longest(self) -> int:
        return 2 * self.past

    def segments(self, sample: int = 0) -> list[Segment]:
        step = 1.4 / max(1, self.sequences - 1)
        starts = [int(self.past * (0.3 + step * number)) for number in range(self.sequences)]
        return [Segment(number, start, 1, sample) for number, start in enumerate(starts)]


UNLIKE = tuple(Unlike("decode", sequences, 1, past) for sequences in (2, 3, 4, 6, 8, 12) for past in (60, 120, 220))


_UNLIKE_SIZES = {Work(each.phase, each.sequences, each.tokens, each.past) for each in UNLIKE}


class Runtime:
    """A plan in force; replays traces against its leader."""

    def __init__(self, leader: LeaderClient) -> None:
        self._leader = leader
        self._runs = 0

    def replay(self, trace: Sequence[Request], in_flight: int | None = None) -> Outcome:
        """Send every request when it is due, or of a closed loop when so many are no longer in flight; note when its tokens come."""
        self._runs += 1
        names = [f"{self._runs}-{number}" for number in range(len(trace))]
        submits = [
            greedy(name, _prompt(number, each.prompt_tokens), each.output_tokens, salt=name)
            for number, (name, each) in enumerate(zip(names, trace, strict=True))
        ]
        moments: dict[str, list[float]] = {submit.request: [] for submit in submits}
        sent = [each.arrival_seconds for each in trace]
        unfinished, due, started = len(trace), 0, time.perf_counter()
        while unfinished:
            now = time.perf_counter() - started
            ended = len(trace) - unfinished
            while due < len(trace) and (sent[due] <= now if in_flight is None else due - ended < in_flight):
                if in_flight is not None:
                    sent[due] = now
                self._leader.send(submits[due])
                due += 1
            if due < len(trace) and in_flight is None and not self._leader.heard(sent[due] - now):
                continue
            # Raises where the slots have lost each other on a machine too busy for heartbeats.
            events = self._leader.events()
            came_at = time.perf_counter() - started
            for event in events:
                moments[event.request].append(came_at)
                unfinished -= event.finish is not None
        asked = [each._replace(arrival_seconds=at) for each, at in zip(trace, sent, strict=True)]
        return _outcome(asked, list(moments.values()))


def _prompt(number: int, tokens: int) -> list[int]:
    return [(7 * number + place) % _VOCABULARY for place in range(tokens)]


def _outcome(trace: Sequence[Request], moments: Sequence[Sequence[float]]) -> Outcome:
    served = tuple(
        Served(request, 0, came[0], came[-1], len(came)) for request, came in zip(trace, moments, strict=True)
    )
    return Outcome(served, (), max(came[-1] for came in moments))


class Runs:
    """The traces run on slots, once at each `take`; what is simulated in the end has the same plan."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._outcomes: dict[str, list[Outcome]] = {}
        self._ending = ExitStack()
        self.plan: Plan | None = None
        self.traces: dict[str, tuple[Request, ...]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def take(self, profile: LatencyProfile) -> None:
        """Run every trace once. The first profile decides what is planned and how fast requests come."""
        if self.plan is None:
            self._start(profile)
        for name, trace in self.traces.items():
            self._outcomes.setdefault(name, []).append(self._runtime.replay(trace))

    def typical(self, name: str) -> Outcome:
        """The run in the middle, by what its answers took."""
        outcomes = sorted(self._outcomes[name], key=lambda outcome: sum(outcome.values("latency")))
        for outcome in self._outcomes[name]:
            _say(f"{name}: {outcome.tokens_per_second:.1f} tokens/s, latency {outcome.percentile('latency', 50):.3f} s")
        return outcomes[len(outcomes) // 2]

    def _start(self, profile: LatencyProfile) -> None:
        source = source_of(profile)
        self.plan = plan_of(self._model, source)
        for stage in self.plan.replicas[0].stages:
            _say(f"stage {stage.stage}: layers {stage.layers} at {stage.bits} bits, from {stage.times.source}")
        crowd = at_once(poisson(1.0, COUNT, PROMPTS, ANSWERS, SEED))
        rate = LOAD * simulate([replica_of(self._model, self.plan, source)], crowd).requests_per_second
        self.traces = {OPEN: poisson(rate, COUNT, PROMPTS, ANSWERS, SEED), CLOSED: crowd}
        slots = self._ending.enter_context(slot_processes(self.plan))
        self._runtime = Runtime(PipelineClient(slots).serve(self.plan))
        self._runtime.replay(crowd[: COUNT // 2])  # kernels are made as steps of a size come for the first time


def survey(model: Path, between: Callable[[LatencyProfile], None]) -> FittedLatency:
    """The layers' seconds on one thread of this machine while its other core decodes, 8 and 16 bits."""
    torch.set_num_threads(1)
    device = ProfiledDevice("cpu", processor_name(), 1, metadata.version("torch"))
    subject = Subject(
        read_fields(model),
        device,
        torch.device("cpu"),
        "bfloat16",
        quick=True,
        formats=("int8", "dense"),
        more=UNLIKE,
        company=1,
        passes=RUNS + 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        notes = Notes(Path(folder) / "notes", subject.key)
        profile = Survey(subject, notes, lambda *_: None, between).run()
        notes.close(done=True)
    return source_of(profile)


def source_of(profile: LatencyProfile) -> FittedLatency:
    """With decode points of unlike lengths alone: those that a continuous batch has."""
    points = tuple(_of_unlike(point) if point.phase == "decode" else point for point in profile.points)
    return FittedLatency(msgspec.structs.replace(profile, points=tuple(point for point in points if point)))


def _of_unlike(point: LatencyPoint) -> LatencyPoint | None:
    """None for points of equal lengths; the others' past is a mean already, not the first sequence's."""
    if point.sequences == 1:
        return point
    if Work(point.phase, point.sequences, point.tokens, point.past) not in _UNLIKE_SIZES:
        return None
    return msgspec.structs.replace(point, past=point.past - (point.sequences - 1) // 2)


def plan_of(model: Path, source: FittedLatency) -> Plan:
    """Two stages."""
    return make_plan(_request(model, source)).plan


def replica_of(model: Path, plan: Plan, source: FittedLatency) -> ReplicaModel:
    """What the simulator makes of the plan."""
    request = _request(model, source)
    return fleet(plan, request.model, request.cluster, Latencies((source,)))[0]


def _request(model: Path, source: FittedLatency) -> PlanRequest:
    nodes = tuple(Node(f"n{place}", (Device("cpu", memory_bytes=_MEMORY_BYTES, threads=1),)) for place in range(2))
    return PlanRequest(
        deployment="bench",
        model_uri=str(model),
        model=Model.from_folder(model),
        cluster=Cluster(nodes, default_link=loopback()),
        workload=Workload(prompt_tokens=96, output_tokens=40, concurrency=24),
        max_model_len=512,
        allowed_bits=(8, 16),
        min_stages=2,
        max_stages=2,
        latency_sources=(source,),
    )


def compare(model: Path) -> list[Case]:
    with Runs(model) as runs:
        _say("measuring layers and running traces in turn")
        source = survey(model, runs.take)
        assert runs.plan is not None, "there is a run between two passes"
        replica = replica_of(model, runs.plan, source)
        return [Case(name, runs.typical(name), simulate([replica], trace)) for name, trace in runs.traces.items()]


def table(cases: Sequence[Case]) -> Table:
    shown = Table(title="simulated against measured", title_justify="left")
    for column in ("trace", "figure", "measured", "simulated", "error"):
        shown.add_column(column, justify="left" if column in {"trace", "figure"} else "right")
    for case in cases:
        for name, (measured, simulated) in case.figures.items():
            shown.add_row(case.name, name, f"{measured:.4g}", f"{simulated:.4g}", f"{simulated / measured - 1:+.1%}")
    return shown


def rows(cases: Sequence[Case]) -> list[Row]:
    """`simulator_error`: the worst of throughput and median latency over both traces; the others are reported."""
    names = {"tokens/s": "throughput", "latency p50": "latency", "ttft p50": "ttft", "tpot p50": "tpot"}
    errors = {
        (case.name, short): abs(case.figures[name][1] / case.figures[name][0] - 1)
        for case in cases
        for name, short in names.items()
    }
    judged = max(error for (_, short), error in errors.items() if short in {"throughput", "latency"})
    worst = {short: max(error for (_, own), error in errors.items() if own == short) for short in names.values()}
    reported = [Row(f"simulator_{short}_error", error, "worst of both traces") for short, error in worst.items()]
    return [Row("simulator_error", judged, "share", "Vidur", 0.09, goal=GOAL, lower_is_better=True), *reported]


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        cases = compare(make_model(Path(folder)))
    Console(width=150).print(table(cases))
    return rows(cases)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    run("simulation", measure)
