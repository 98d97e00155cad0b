"""Random deployments of two and three unlike devices on this machine: tokens a second simulated, beside what they do.

`python -m benchmarks.local_fleets [--deployments 6] [--only NUMBER] [--json FILE]`, some three minutes each on two quiet cores. A device is one core
or a part of one (`benchmarks.throttle`); models, loads and widths are drawn at random. The planner and its simulator know the processor as `strata up`
measures it, and the model's shapes: no profile of the model, nothing of the run. It is measured before and after each run, for its speed drifts; what is
simulated with both counts in the mean. Both run the same closed loop, each client asking again when it is answered.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row, run
from benchmarks.served_plans import loopback
from benchmarks.simulation import Runtime
from benchmarks.slots import slot_processes
from benchmarks.throttle import slower, throttled, turns_of
from strata_operator.local.machine import with_measured_rates
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Plan, Replica
from strata_planner.costs.latency import Latencies
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanRequest, make_plan
from strata_planner.simulate import Request, fleet, of_clients, simulate
from strata_runtime.model.random_model import make_random_model
from strata_runtime.wire.client import PipelineClient

SEED, GOAL = 12, 0.10
WAVES, FEWEST = 3, 24  # requests that are counted of each client, and in all
Parts = tuple[tuple[float, ...], ...]  # of each core, what its devices have of it


@dataclass(frozen=True)
class Deployment:
    number: int
    cores: Parts
    shape: dict[str, int]
    bits: tuple[int, ...]
    load: Workload

    @property
    def parts(self) -> list[float]:
        return [part for core in self.cores for part in core]

    def __str__(self) -> str:
        shape, load = self.shape, self.load
        return (
            f"{self.number}: {' + '.join(f'{part:g}' for part in self.parts)} cores, {shape['num_hidden_layers']} layers of {shape['hidden_size']}, "
            f"{'/'.join(map(str, self.bits))} bits, {load.concurrency} x ({load.prompt_tokens} + {load.output_tokens})"
        )


@dataclass(frozen=True)
class Ran:
    """Tokens a second in the steady state: by the plan's formula, simulated, measured."""

    deployment: Deployment
    layers: Sequence[str]
    predicted: float
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def deployments(how_many: int) -> Iterator[Deployment]:
    """Two devices and three in turn. Steps of a stage are several of a part's turns."""
    draw = random.Random(SEED)
    for number in range(how_many):
        part = draw.choice([0.5, 0.6, 0.75])
        cores: Parts = (
            ((1.0,), (part,)) if number % 2 == 0 else ((draw.choice([0.75, 1.0]),), (part, round(1 - part, 2)))
        )
        heads = draw.choice([8, 12, 16])
        hidden = 64 * heads
        shape = {
            "vocab_size": 16_000,
            "hidden_size": hidden,
            "intermediate_size": 64 * round(hidden * draw.uniform(2.5, 4.0) / 64),
            "num_hidden_layers": draw.randint(10, 20),
            "num_attention_heads": heads,
            "num_key_value_heads": heads // draw.choice([1, 2, 4]),
            "max_position_embeddings": 1024,
        }
        bits = draw.choice([(16,), (8,), (4, 16), (4,)])
        load = Workload(
            prompt_tokens=draw.choice([32, 96, 192]),
            output_tokens=draw.choice([24, 48, 64]),
            concurrency=draw.choice([2, 4, 8, 16]),
        )
        yield Deployment(number, cores, shape, bits, load)


def measured_rates() -> DeviceProfile:
    """One core of this machine, now."""
    alone = Cluster((Node("this", (Device("cpu", threads=1),)),))
    return with_measured_rates(alone, fresh=True).accelerators()[0].profile


def question(asked: Deployment, model: Path, rates: DeviceProfile) -> PlanRequest:
    def device(part: float) -> Device:
        return Device("cpu", memory_bytes=3 << 30, threads=1, profile=msgspec.to_builtins(slower(rates, part)))

    nodes = tuple(Node(f"n{place}", (device(part),)) for place, part in enumerate(asked.parts))
    return PlanRequest(
        deployment="bench",
        model_uri=str(model),
        model=Model.from_folder(model),
        cluster=Cluster(nodes, default_link=loopback()),
        workload=asked.load,
        max_model_len=2 * asked.load.sequence_tokens,
        allowed_bits=asked.bits,
        min_stages=len(nodes),
        max_stages=len(nodes),
    )


def placed(asked: Deployment) -> tuple[dict[str, int], dict[str, tuple[float, float]]]:
    """The core of each node, and of nodes with a part of one when they have it: after each other."""
    cores, turns, place = dict[str, int](), dict[str, tuple[float, float]](), count()
    for core, parts in enumerate(asked.cores):
        for part, end in zip(parts, accumulate(parts), strict=True):
            node = f"n{next(place)}"
            cores[node] = core
            if part < 1:
                turns[node] = end - part, end
    return cores, turns


def see(asked: Deployment, folder: Path) -> Ran:
    model = make_random_model(folder / str(asked.number), "llama", dtype=torch.bfloat16, **asked.shape)
    request = question(asked, model, measured_rates())
    plan = make_plan(request).plan
    (replica,) = plan.replicas
    clients, load = replica.concurrency, asked.load
    lengths, most = (load.prompt_tokens, load.output_tokens), request.max_model_len
    trace = of_clients(clients, max(WAVES * clients, FEWEST), *lengths, SEED, most)
    own, (cores, turns) = sorted(os.sched_getaffinity(0)), placed(asked)
    on = {stage.slot: (own[cores[stage.node] % len(own)],) for stage in plan.stages}
    with slot_processes(plan, on=on) as slots:
        runtime = Runtime(PipelineClient(slots).serve(plan))
        runtime.replay(trace[: 2 * clients], clients)  # kernels are made for the steps' sizes as they first come
        pids = {name: slot.process.pid for name, slot in slots.items()}
        with throttled(turns_of(plan, pids, turns)):
            seen = runtime.replay(trace, clients).steady_tokens_per_second(clients)
    told = [simulated(plan, each, trace, clients) for each in (request, question(asked, model, measured_rates()))]
    return Ran(asked, _layers(replica), plan.prediction.tokens_per_second, statistics.mean(told), seen)


def simulated(plan: Plan, request: PlanRequest, trace: Sequence[Request], clients: int) -> float:
    """Tokens a second on the request's devices."""
    replicas = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    return simulate(replicas, trace, in_flight=clients).steady_tokens_per_second(clients)


def _layers(replica: Replica) -> list[str]:
    return [f"{len(stage.bits)} at {'/'.join(map(str, sorted(set(stage.bits))))}" for stage in replica.stages]


def show(ran: Sequence[Ran]) -> None:
    table = Table(title="tokens/s of a closed loop", title_justify="left")
    for column in ("deployment", "layers", "by formula", "simulated", "measured", "error"):
        table.add_column(column, overflow="fold")
    for each in ran:
        figures = (f"{figure:.1f}" for figure in (each.predicted, each.simulated, each.measured))
        table.add_row(str(each.deployment), ", ".join(each.layers), *figures, f"{each.error:+.1%}")
    Console(width=160).print(table)


def measure(how_many: int, only: int | None) -> list[Row]:
    ran = []
    with tempfile.TemporaryDirectory() as folder:
        for each in deployments(how_many if only is None else only + 1):
            if only is None or each.number == only:
                ran.append(see(each, Path(folder)))
                show(ran[-1:])
    show(ran)
    errors = [abs(each.error) for each in ran]
    by_formula = statistics.mean(abs(each.predicted / each.measured - 1) for each in ran)
    unit = f"mean distance of simulated from measured tokens/s, {len(ran)} deployments"
    return [
        Row(
            "simulated_over_measured",
            statistics.mean(errors),
            unit,
            "by the formula",
            by_formula,
            goal=GOAL,
            lower_is_better=True,
        ),
        Row("simulated_over_measured_worst", max(errors), "the furthest"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_fleets", add_help=False)
    parser.add_argument("--deployments", type=int, default=6)
    parser.add_argument("--only", type=int, default=None)
    chosen, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    run("local_fleets", lambda: measure(chosen.deployments, chosen.only), rest)


if __name__ == "__main__":
    main()
