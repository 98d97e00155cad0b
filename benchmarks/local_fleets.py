"""Random deployments of two and three unlike devices on this machine: tokens a second simulated, beside what they do.

`python -m benchmarks.local_fleets [--deployments 6] [--only NUMBER] [--json FILE]`, some three minutes each on two quiet cores. A device is one core
or a part of one (`benchmarks.throttle`); models, loads and widths are drawn at random. The planner and its simulator know the processor as `strata up`
measures it, anew for each deployment as its speed drifts, and the model's shapes: no profile of the model, nothing of the run. Both run the same closed
loop, each client asking again when it is answered.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
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
from benchmarks.slots import SlotProcess
from benchmarks.throttle import Turn, slower, throttled, with_children
from strata_operator.local.machine import with_measured_rates
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Plan, Replica
from strata_planner.costs.latency import Latencies
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanRequest, make_plan
from strata_planner.simulate import Outcome, Request, Served, fleet, of_clients, simulate
from strata_runtime.model.random_model import make_random_model
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy

SEED, GOAL = 12, 0.10
WAVES, FEWEST = 3, 24  # requests that are counted of each client, and in all
_VOCABULARY = 1000  # that prompts use
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


@contextlib.contextmanager
def slots_of(asked: Deployment, plan: Plan) -> Iterator[dict[str, SlotProcess]]:
    """A slot for each device, on its core."""
    slots: dict[str, SlotProcess] = {}
    on = {f"n{place}": core for place, core in enumerate(at for at, parts in enumerate(asked.cores) for _ in parts)}
    own = sorted(os.sched_getaffinity(0))
    try:
        for stage in plan.stages:
            slots[stage.slot] = SlotProcess(stage.slot, 1, (own[on[stage.node] % len(own)],))
        yield slots
    finally:
        for slot in slots.values():
            slot.close()


def turns(asked: Deployment, plan: Plan, slots: dict[str, SlotProcess]) -> list[Turn]:
    """Devices of one core after each other; a whole core's is left alone."""
    by_node = {stage.node: with_children(slots[stage.slot].process.pid) for stage in plan.stages}
    found, place = [], count()
    for parts in asked.cores:
        ends = list(accumulate(parts))
        for part, end in zip(parts, ends, strict=True):
            pids = by_node[f"n{next(place)}"]
            if part < 1:
                found.append(Turn(pids, end - part, end))
    return found


class ClosedLoop:
    """A trace whose next request is sent when one is answered, against a leader."""

    def __init__(self, leader: LeaderClient, name: str) -> None:
        self._leader, self._name = leader, name

    def replay(self, trace: Sequence[Request], clients: int) -> Outcome:
        started, moments = time.perf_counter(), [list[float]() for _ in trace]
        sent, ended = [0.0] * len(trace), 0
        for number in range(clients):
            self._send(number, trace[number])
        following = clients
        while ended < len(trace):
            events = self._leader.events()
            now = time.perf_counter() - started
            for event in events:
                moments[int(event.request.rpartition("-")[2])].append(now)
                if event.finish is None:
                    continue
                ended += 1
                if following < len(trace):
                    sent[following] = now
                    self._send(following, trace[following])
                    following += 1
        served = [
            Served(request._replace(arrival_seconds=at), 0, came[0], came[-1], len(came))
            for request, at, came in zip(trace, sent, moments, strict=True)
        ]
        return Outcome(tuple(served), (), max(came[-1] for came in moments))

    def _send(self, number: int, request: Request) -> None:
        prompt = [(7 * number + place) % _VOCABULARY for place in range(request.prompt_tokens)]
        name = f"{self._name}-{number}"
        self._leader.send(greedy(name, prompt, request.output_tokens, salt=name))


def see(asked: Deployment, folder: Path) -> Ran:
    model = make_random_model(folder / str(asked.number), "llama", dtype=torch.bfloat16, **asked.shape)
    request = question(asked, model, measured_rates())
    plan = make_plan(request).plan
    (replica,) = plan.replicas
    (simulating,) = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    clients, load = replica.concurrency, asked.load
    trace = of_clients(
        clients,
        max(WAVES * clients, FEWEST),
        load.prompt_tokens,
        load.output_tokens,
        SEED,
        simulating.limits.most_tokens,
    )
    told = simulate([simulating], trace, in_flight=clients)
    with slots_of(asked, plan) as slots:
        leader = PipelineClient(slots).serve(plan)
        ClosedLoop(leader, "warm").replay(
            trace[: 2 * clients], clients
        )  # kernels are made for the steps' sizes as they first come
        with throttled(turns(asked, plan, slots)):
            seen = ClosedLoop(leader, "run").replay(trace, clients)
    rates = (each.steady_tokens_per_second(clients) for each in (told, seen))
    return Ran(asked, _layers(replica), plan.prediction.tokens_per_second, *rates)


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
