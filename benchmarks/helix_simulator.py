"""Our placements in Helix's own simulator, beside Helix's and its separate pipelines (ASPLOS 2025, its public artifact).

`python -m benchmarks.helix_simulator --artifact DIR [--cluster 24] [--plan FILE] [--quick] [--json FILE]`, about a quarter of an hour;
`--quick` runs ours alone, beside the figure that the artifact prints. `DIR`: a checkout of github.com/Thesys-lab/Helix-ASPLOS25; its
simulator runs as it stands, Llama-2-70B at 16 bits, offline. Each replica of a plan is simulated as the artifact simulates its separate
pipelines, alone, and the tokens decoded in 600 s are summed. Requests run as our scheduler would admit them, by the KV of the tightest
stage (`reference/helix_admission.py`).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.layouts import EXAMPLES, llama
from benchmarks.reference.helix_artifact import Artifact, Decoded, KvTables, written
from benchmarks.reference.helix_cases import CASES, PRODUCTS, Case, cluster_of
from benchmarks.reference.helix_files import Held, Machines, read_machines
from benchmarks.reference.published_tables import helix_table
from benchmarks.rows import LISTED, Row, run
from strata_planner.contract.formats import FormatName
from strata_planner.contract.plan import Plan, Replica
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.costs.tables import LayerTables, TableShape
from strata_planner.errors import InputError
from strata_planner.question.model import LayerShape, Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan

# Of the trace: mean lengths, and a deviation with which requests in flight hold 1,097 tokens as they do there, where KV is taken as it is
# filled and long answers go with long prompts. More in flight than fits.
MEAN = Workload(prompt_tokens=763, output_tokens=232, concurrency=1024, output_deviation=154)
MOST_TOKENS = 2048 + 1024
LAYERS = 80
COPIES = (4e9, 5e9)  # bytes a second, to the device and from it
PLAN_SECONDS = 4.0  # the search's limit; a plan is to be there within 5
HELIX_SECONDS = 600.0  # of Gurobi on 14 cores, says the artifact


@dataclass(frozen=True)
class Ground:
    """A cluster of the artifact, ready to plan for and to simulate on."""

    artifact: Artifact
    case: Case
    machines: Machines
    kv: KvTables
    request: PlanRequest


@dataclass(frozen=True)
class Served:
    """A replica in Helix's simulator."""

    replica: Replica
    decoded: Decoded


class HostCopies:
    """The artifact's copies between a node's memory and its device, of all tokens that came (compute_node.py): seconds of a step."""

    def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> None:
        """Known by the tables."""

    def head(self, model: Model, rates: Rates, sequences: int) -> None:
        """Not known there."""

    def step(self, model: Model, rates: Rates, phase: Phase) -> Timed:  # noqa: ARG002  the same on all nodes
        size = phase.total_tokens * model.hidden_size * 2
        return Timed(size * sum(1 / rate for rate in COPIES), "the artifact's copies")


def ground(folder: Path, name: str) -> Ground:
    """Raises InputError."""
    artifact, case = Artifact(folder), CASES[name]
    machines = read_machines(case.path(folder, case.complete))
    separate = [
        (layout.solution, layout.cluster)
        for layout in case.separate_layouts(folder, machines)
        if layout.solution.exists()
    ]
    kv = KvTables.of(artifact, machines.counts, separate)
    model = Model.from_folder(EXAMPLES / "models" / "llama-2-70b", for_serving=False)
    layer = model.layers[0]
    usable = {each: kv.usable_bytes(each, 2 * layer.parameters) for each in machines.counts}
    tables = tuple(
        helix_table(
            folder / "simulator" / "model_manager" / "llama2_70b" / each.lower(),
            TableShape.of(layer),
            (PRODUCTS.get(each, each),),
        )
        for each in machines.counts
    )
    request = llama(
        cluster_of(machines, usable),
        MEAN,
        latency_sources=(LayerTables(tables), HostCopies()),
        max_model_len=MOST_TOKENS,
        tensor_parallel=(1,),
    )
    return Ground(artifact, case, machines, kv, request)


def held(replica: Replica, machines: Machines, kv: KvTables) -> list[Held]:
    """A replica's stages as nodes of the artifact. Raises InputError for a node or a stage that it does not have."""
    numbers = {name: number for number, name in enumerate(machines.names)}
    layers = replica.stages[-1].layers[1] + 1
    if layers != LAYERS:
        raise InputError(f"a plan of {layers} layers: the artifact's model has {LAYERS}, plan for Llama-2-70B")
    found = []
    for stage in replica.stages:
        if stage.node not in numbers or len(stage.devices) != 1:
            raise InputError(
                f"stage {stage.stage} on {len(stage.devices)} devices of node '{stage.node}': plan for one device on each of "
                f"{', '.join(machines.names)}"
            )
        number, (first, last) = numbers[stage.node], stage.layers
        entries = kv.entries(machines.types[number], last + 1 - first)
        found.append(Held(number, first, last + 1, entries))
    return found


def served(replica: Replica, on: Ground) -> Served:
    """In Helix's simulator."""
    stages = held(replica, on.machines, on.kv)
    folder, case = on.artifact.folder, on.case
    with tempfile.TemporaryDirectory() as files:
        layout = written(Path(files), stages, on.machines, case.path(folder, case.complete), case.profiles(folder))
        return Served(replica, on.artifact.decoded(layout))


def measure(folder: Path, name: str, plan: Plan | None, console: Console, *, quick: bool) -> list[Row]:
    on = ground(folder, name)
    seconds = None
    if plan is None:
        started = time.perf_counter()
        plan = make_plan(replace(on.request, time_limit_seconds=PLAN_SECONDS)).plan
        seconds = time.perf_counter() - started
    ours = [served(each, on) for each in plan.replicas]
    console.print(_table(name, ours, on.case))
    total = sum(each.decoded.tokens_per_second for each in ours)
    theirs = on.case.published["Helix"] if quick else on.artifact.decode_rate(on.case.helix(folder, on.machines))
    peer = "Helix, as published" if quick else "Helix, same run"
    tuned = name == "24"
    rows = [Row(f"helix_{name}", total, "tokens/s", peer, theirs, ratio=total / theirs, goal=1.1 if tuned else None)]
    if seconds is not None:
        goal = 5.0 if tuned else None
        rows.append(
            Row(f"plan_seconds_{name}", seconds, "s", "Helix's Gurobi", HELIX_SECONDS, goal=goal, lower_is_better=True)
        )
    if not quick:
        rate = sum(on.artifact.decode_rate(each) for each in on.case.separate_layouts(folder, on.machines))
        rows.append(Row(f"separate_{name}", rate, "tokens/s", "Helix, same run", theirs, ratio=rate / theirs))
    return rows


def _table(name: str, ours: Sequence[Served], case: Case) -> Table:
    published = ", ".join(f"{who} {rate}" for who, rate in case.published.items())
    shown = Table(title=f"Ours on cluster {name}, Helix's simulator; published: {published}", title_justify="left")
    for column in ("replica", "stages", "planned in flight", "in flight", "preempted", "tokens/s"):
        shown.add_column(column)
    for each in ours:
        stages = " ".join(f"{stage.node}:{stage.layers[1] + 1 - stage.layers[0]}" for stage in each.replica.stages)
        shown.add_row(
            str(each.replica.replica),
            stages,
            str(each.replica.concurrency),
            str(each.decoded.running),
            str(each.decoded.preempted),
            f"{each.decoded.tokens_per_second:.1f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--artifact", type=Path, metavar="DIR")
    parser.add_argument("--cluster", choices=[*CASES], default="24")
    parser.add_argument("--plan", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    console = Console(width=150)
    if chosen.artifact is None:
        rows = ", ".join(LISTED["helix_simulator"])
        console.print(
            f"left out, as they need Helix's artifact (github.com/Thesys-lab/Helix-ASPLOS25): {rows}. Name its folder with --artifact"
        )
        run("helix_simulator", list, rest)
        return
    plan = Plan.decode(chosen.plan.read_bytes()) if chosen.plan else None
    run("helix_simulator", lambda: measure(chosen.artifact, chosen.cluster, plan, console, quick=chosen.quick), rest)


if __name__ == "__main__":
    main()
