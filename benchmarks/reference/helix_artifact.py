"""Helix's public artifact (ASPLOS 2025, github.com/Thesys-lab/Helix-ASPLOS25), run as it stands from a folder that the user names.

Called by `benchmarks.helix_simulator`. Offline runs of Llama-2-70B as the artifact's own scripts make them: 60 s of warm-up, 600 s that
count, lengths drawn from Azure's conversations with seed 0. Gurobi and matplotlib, which a simulation does not need, are stood in
for. Histories that the simulator keeps of every event and finished round are dropped: they fill 10 GB and decide nothing.
"""

import contextlib
import functools
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.reference.helix_admission import Admission, prompts_under_way
from benchmarks.reference.helix_feeder import Feeder
from benchmarks.reference.helix_files import Held, Machines, cluster_text, read_held, read_nics, solution_text
from strata_planner.errors import InputError

WARM_UP, DURATION = 60, 600  # seconds
KV_BYTES = 4096  # of a token in one layer: 8 heads of 128, keys and values, 16 bits
STOOD_IN = ("gurobipy", "matplotlib", "matplotlib.pyplot")
LONGEST_PROMPT = 2048  # tokens that every machine takes in one step; the artifact leaves longer requests out


@dataclass(frozen=True)
class Layout:
    """Files of a layout. `machines`: how many of each type. `kv_tokens`: of a layer, on a pipeline of ours, where our scheduler admits with
    `prompts` under way; else `in_flight`, a constant number; with neither Helix's own admission and routes.
    """

    solution: Path
    cluster: Path
    complete: Path
    profiles: Path
    machines: Mapping[str, int]
    in_flight: int | None = None
    kv_tokens: int | None = None
    prompts: int = 1

    @property
    def is_routed(self) -> bool:
        return self.in_flight is None and self.kv_tokens is None


@dataclass(frozen=True)
class Decoded:
    """`running`: requests in the end. `preempted`: times that one was stopped to be computed again; both told by our admission alone."""

    tokens_per_second: float
    running: int = 0
    preempted: int = 0


class Artifact:
    """The simulator's modules, imported from `folder`. Raises InputError where there is none."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "simulator" / "event_simulator").is_dir():
            raise InputError(
                f"{folder} holds no simulator/event_simulator: name a checkout of github.com/Thesys-lab/Helix-ASPLOS25"
            )
        self.folder = folder.resolve()
        with _importing(self.folder):
            self._cluster = importlib.import_module("simulator.event_simulator.cluster_simulator")
            queries: Any = importlib.import_module("simulator.event_simulator.query_manager")
            chains: Any = importlib.import_module("simulator.scheduler.naive_scheduler")
            self._layouts = importlib.import_module("simulator.initial_layout.layout_synthesizer")
            self._feeder = importlib.import_module("simulator.trace_generator.simulator_query_feeder")
            self._flow = importlib.import_module("simulator.scheduler.global_maxflow.global_maxflow_scheduler")
            self._lengths = importlib.import_module("simulator.trace_generator.length_sampler")
        queries.copy = SimpleNamespace(deepcopy=lambda route: route)  # a request's route is never changed
        chains.NaiveScheduler.schedule_transmission = _first_alone(chains.NaiveScheduler.schedule_transmission)

    def manager(self, machines: Mapping[str, int]) -> Any:
        """The artifact's tables of Llama-2-70B on these machines."""
        return self._cluster.ModelManager(self._cluster.ModelName.LLaMa70B, dict(machines))

    def decoded(self, layout: Layout) -> Decoded:
        """From the first minute's end for ten minutes. Raises AssertionError where the KV of a node runs over."""
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as workspace:
            return self._run(layout, workspace)

    def decode_rate(self, layout: Layout) -> float:
        """Tokens a second; raises as `decoded`."""
        return self.decoded(layout).tokens_per_second

    def _run(self, layout: Layout, workspace: str) -> Decoded:
        cluster, name = self._cluster, self._cluster.ModelName.LLaMa70B
        placed = self._layouts.LayoutSynthesizer(
            complete_cluster_file_name=str(layout.complete),
            machine_profile_name=str(layout.profiles),
            model_name=name,
            workspace_path=workspace,
            layout_method=self._layouts.LayoutMethod.LoadExisting,
            machine_num_dict=dict(layout.machines),
        )
        files = {"solution_file_name": str(layout.solution), "simulator_cluster_file_name": str(layout.cluster)}
        simulator = cluster.ClusterSimulator(model_name=name, machine_num_dict=dict(layout.machines))
        simulator.model_manager.allow_force_set = not layout.is_routed  # as for its separate pipelines
        simulator.from_ini_file(config_file_name=placed.synthesize(args=files))
        method, arguments = self._admission(layout)
        simulator.init_scheduler(scheduling_method=method, args=arguments)
        simulator.init_query_manager()
        simulator.mark_as_ready()
        finished = _forget_histories(simulator)
        started = placed.set_layout(simulator=simulator)
        simulator.update_scheduler()
        if layout.kv_tokens is None:
            self._offline(layout, started).auto_simulate(simulator=simulator)
            return Decoded(finished.decoded(started + WARM_UP, started + WARM_UP + DURATION) / DURATION)
        admission = Admission(layout.kv_tokens, layout.prompts, LONGEST_PROMPT, self._endless())
        Feeder(simulator, admission).run(until=started + WARM_UP + DURATION)
        rate = finished.decoded(started + WARM_UP, started + WARM_UP + DURATION) / DURATION
        return Decoded(rate, admission.running, admission.preempted)

    def _offline(self, layout: Layout, started: float) -> Any:
        return self._feeder.OfflineRequestFeeder(
            initial_query_count=layout.in_flight or 20,
            start_time=started,
            duration=WARM_UP + DURATION,
            stop_at_duration=True,
            feed_hwm=0.8,
            seed=0,
        )

    def _endless(self) -> Iterator[tuple[int, int]]:
        """Prompt and answer of one request after the other, as its own feeder draws them."""
        sampler = self._lengths.LengthSampler(self._lengths.Dataset.AzureConversation, seed=0)
        while True:
            yield sampler.sample_length()

    def _admission(self, layout: Layout) -> tuple[Any, dict[str, Any] | None]:
        methods = self._cluster.SchedulingMethod
        if not layout.is_routed:
            return methods.Naive, None
        parameters = self._flow.KVParameters(expected_kv_hwm=0.85, expected_output_length_ratio=1)
        return methods.MaxFlow, {"kv_param": parameters, "scheduling_mode": self._flow.SchedulingMode.Offline}


@dataclass(frozen=True)
class KvTables:
    """KV entries (tokens times layers) of a machine by its number of layers: the artifact's own, and between them on a line.

    Above half a machine's memory for weights the artifact has tables no more, but its separate pipelines say what is left there.
    """

    points: Mapping[str, Mapping[int, int]]

    @classmethod
    def of(cls, artifact: Artifact, machines: Mapping[str, int], separate: Sequence[tuple[Path, Path]]) -> "KvTables":
        manager = artifact.manager(machines)
        points = {
            each: {
                layers: manager.get_kv_cache_capacity(each, layers)
                for layers in range(1, manager.get_max_num_layers(each) + 1)
            }
            for each in machines
        }
        for solution, cluster in separate:
            for each, layers, entries in read_held(solution, cluster):
                points[each].setdefault(layers, entries)
        return cls(points)

    def entries(self, machine: str, layers: int) -> int:
        """Raises InputError for more layers than any layout of the artifact puts there."""
        known = self.points[machine]
        if layers in known:
            return known[layers]
        if not 1 <= layers <= max(known):
            raise InputError(
                f"{layers} layers on a {machine}: the artifact knows what memory is left up to {max(known)}"
            )
        low, high = max(each for each in known if each < layers), min(each for each in known if each > layers)
        return int(known[low] + (known[high] - known[low]) * (layers - low) / (high - low))

    def usable_bytes(self, machine: str, layer_bytes: int) -> int:
        """Memory for weights and KV such that no number of layers has more KV than the artifact gives it."""
        return min(layers * layer_bytes + entries * KV_BYTES for layers, entries in self.points[machine].items())


def written(folder: Path, pipe: Sequence[Held], machines: Machines, complete: Path, profiles: Path) -> Layout:
    """A fixed pipeline as a layout of its own, with what its tightest stage holds."""
    solution, cluster = folder / "solution.ini", folder / "simulator_cluster.ini"
    solution.write_text(solution_text([pipe]), encoding="utf-8")
    cluster.write_text(cluster_text([pipe], machines, read_nics(profiles)), encoding="utf-8")
    kv_tokens = min(each.kv_entries // (each.end - each.first) for each in pipe)
    prompts = prompts_under_way(len(pipe))
    return Layout(solution, cluster, complete, profiles, machines.counts, kv_tokens=kv_tokens, prompts=prompts)


def _first_alone(schedule: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Of requests that wait for the only link of a node the first is sent. The artifact goes through all of them, of which there are hundreds."""

    @functools.wraps(schedule)
    def of_first(self: Any, node: Any) -> Any:
        waiting = node.outbound_request_dict
        if len(waiting) < 2 or len(node.outbound_links) > 1:  # nothing to leave out, or another link's
            return schedule(self, node)
        node.outbound_request_dict = dict([next(iter(waiting.items()))])
        try:
            return schedule(self, node)
        finally:
            node.outbound_request_dict = waiting

    return of_first


class _Finished(dict[int, Any]):
    """In place of all finished rounds: when each that decoded ended, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []

    def __setitem__(self, number: int, value: tuple[float, Any]) -> None:
        time, request = value
        if request.prev_num_tokens:
            self._times.append(time)

    def decoded(self, start: float, end: float) -> int:
        return sum(start <= time <= end for time in self._times)


class _Nothing(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        """Not kept."""

    def append(self, value: Any) -> None:
        """Not kept."""


def _forget_histories(simulator: Any) -> _Finished:
    simulator.finished_requests = finished = _Finished()
    simulator.previous_events_list = simulator.previous_events_dict = _Nothing()
    simulator.logger.add_log = lambda **_: None
    simulator.query_manager.latency_analyzer.add_request = lambda **_: None
    simulator.query_manager.latency_analyzer.add_query = lambda **_: None
    simulator.query_manager.finished_queries = _Nothing()
    return finished


@contextlib.contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """The folder on the path, for good as the artifact imports late; modules that a simulation does not need stood in for."""
    absent = {name: _StandIn(name) for name in STOOD_IN if name not in sys.modules}
    sys.modules.update(absent)
    sys.path.append(os.fspath(folder))
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"Helix's artifact needs '{error.name}', which is not installed: pip install {error.name}"
        ) from error
    finally:
        for name in absent:
            del sys.modules[name]


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(name)
