"""Several replicas on this machine, through slots, gateway and HTTP: what the loss of one costs the other, and what routing by planned capacity gains.

`python -m benchmarks.replicas [loss] [routing] [--json FILE]`, three minutes on two quiet cores. Each replica is a slot of one thread that runs for a share of the
time (`benchmarks.throttle`), so that two slots, gateway and clients never want more than two cores.

layout_loss  tokens a second of one of two equal replicas, in the six seconds after the other was killed over the same seconds of such
             streams without a loss: answers grow slower as they grow longer
routing      requests answered within the plan's deadline by replicas of speeds 3 to 1, over the same requests sent to them in turn
"""

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import torch
from msgspec import structs
from rich.console import Console

from benchmarks.rows import Row, run
from benchmarks.throttle import slower, throttled, turns_of
from benchmarks.truth import write_tokenizer
from strata_operator.demo import HOST
from strata_operator.local.deployment import LocalDeployment, LocalOptions, Programs
from strata_operator.local.machine import with_measured_rates
from strata_operator.local.ports import free_port
from strata_operator.local.run import log_folder, serve
from strata_planner.contract.plan import Plan
from strata_planner.costs.latency import Latencies
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.simulate import fleet, simulate
from strata_planner.simulate.routing import Routing, least_loaded
from strata_planner.simulate.trace import Request, poisson
from strata_runtime.model.random_model import make_random_model

NAME = "replicas"
PARTS = ("loss", "routing")
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PROMPT, ANSWER, IN_FLIGHT = 64, 48, 8
SHORT = Workload(PROMPT, ANSWER, IN_FLIGHT)
LONG = Workload(16, 900, IN_FLIGHT)  # streams that no loss outlasts: rates of decoding alone
LOSSES, LOSS_SECONDS, SETTLE_SECONDS, LOOK_SECONDS = 4, 6.0, 3.0, 0.02
EVEN, FAST, SLOW = 0.45, 0.72, 0.24  # of a core
LOAD = 0.6  # of the capacity
PATIENCE = 2.5  # deadline over an answer's seconds in a full pipeline
TRACE_SECONDS = 40.0


def plan_request(model: Path, shares: Sequence[float], load: Workload = SHORT) -> PlanRequest:
    """A node for each share of a core."""
    memory = 400_000_000
    nodes = tuple(Node(name, (Device("cpu", memory_bytes=memory, threads=1),)) for name in "abcd"[: len(shares)])
    measured = with_measured_rates(Cluster(nodes), 1)  # of a whole core: shares are taken of that
    nodes = tuple(
        Node(node.name, (structs.replace(node.devices[0], profile=_fields(measured, at, share)),))
        for at, (node, share) in enumerate(zip(nodes, shares, strict=True))
    )
    return PlanRequest(
        deployment=NAME,
        model_uri=f"file://{model}",
        model=Model.from_folder(model),
        cluster=Cluster(nodes),
        workload=load,
        max_model_len=max(256, load.sequence_tokens),
        allowed_bits=(16,),
        solver="layout",
        max_stages=1,
    )


def _fields(measured: Cluster, at: int, share: float) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(slower(measured.accelerators()[at].profile, share))
    return fields


@asynccontextmanager
async def serving(plan: Plan, gateway: str = "strata_runtime.gateway.__main__") -> AsyncIterator[LocalDeployment]:
    """As `strata up` serves it."""
    with log_folder(None) as logs:
        options = LocalOptions(NAME, logs, HOST, free_port(HOST), programs=Programs(gateway=gateway))
        async with serve(plan, options, Console(stderr=True, quiet=True)) as deployment:
            yield deployment


def held(deployment: LocalDeployment, shares: Sequence[float]) -> contextlib.AbstractContextManager[None]:
    """Each slot to its node's share, in turns that do not overlap where they fit into a period."""
    ends = [min(1.0, sum(shares[: at + 1])) for at in range(len(shares))]
    of_nodes = {name: (end - share, end) for name, share, end in zip("abcd", shares, ends, strict=False)}
    return throttled(turns_of(deployment.plan, deployment.pids, of_nodes))


class Clients:
    """Of the gateway's HTTP interface; every prompt is its own, and answers have their full length."""

    def __init__(self, deployment: LocalDeployment) -> None:
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=deployment.options.url, timeout=120.0, limits=limits)
        self._numbers = itertools.count()

    async def answer(self, prompt: int = PROMPT, answer: int = ANSWER) -> float:
        """Seconds that it took."""
        number = next(self._numbers)
        body = {
            "model": NAME,
            "prompt": [3 + (7 * number + 3 * place) % 8000 for place in range(prompt)],
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": uuid4().hex,
        }
        begun = time.monotonic()
        response = await self._http.post("/v1/completions", json=body)
        response.raise_for_status()
        assert response.json()["usage"]["completion_tokens"] == answer
        return time.monotonic() - begun

    async def follow(self, trace: Sequence[Request]) -> list[float]:
        """Each request at its moment, whatever has become of the others: seconds to their answers."""
        begun = time.monotonic()

        async def one(request: Request) -> float:
            await asyncio.sleep(begun + request.arrival_seconds - time.monotonic())
            return await self.answer(request.prompt_tokens, request.output_tokens)

        return list(await asyncio.gather(*map(one, trace)))

    async def close(self) -> None:
        await self._http.aclose()


@asynccontextmanager
async def clients_of(deployment: LocalDeployment) -> AsyncIterator[Clients]:
    clients = Clients(deployment)
    try:
        yield clients
    finally:
        await clients.close()


async def rate_of(deployment: LocalDeployment, slot: str, seconds: float) -> float:
    """Tokens a second that its stage decodes, by the slot's own clock."""
    (first,) = deployment.slot_statuses[slot].roles
    await asyncio.sleep(seconds)
    (last,) = deployment.slot_statuses[slot].roles
    assert last.formed == first.formed, "it was formed anew: its KV is lost"
    return (last.decode_tokens - first.decode_tokens) / (last.wall_seconds - first.wall_seconds)


async def survivors_rate(deployment: LocalDeployment, clients: Clients, number: int, *, loses: bool) -> float:
    """Of the replica that is left when that with this number is killed; or of the same one in the same seconds of such streams without a loss."""
    lost, kept = (deployment.plan.replicas[(number + at) % 2].stages[0].slot for at in range(2))
    streams = [asyncio.create_task(clients.answer(LONG.prompt_tokens, LONG.output_tokens)) for _ in range(IN_FLIGHT)]
    with held(deployment, (EVEN, EVEN)):
        await asyncio.sleep(SETTLE_SECONDS)
        measured = asyncio.create_task(rate_of(deployment, kept, LOSS_SECONDS))
        if loses:
            dead = deployment.pids[lost]
            os.kill(dead, signal.SIGKILL)
            while deployment.pids.get(lost, dead) == dead:  # noqa: ASYNC110  its supervisor tells nobody
                await asyncio.sleep(LOOK_SECONDS)
        with held(deployment, (EVEN, EVEN)) if loses else contextlib.nullcontext():  # it that is back, too
            rate = await measured
    ended = [each for each in streams if each.done()]
    assert not ended, f"{len(ended)} streams have ended: they were to outlast the loss"
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return rate


async def _lose(model: Path) -> Row:
    plan = make_plan(plan_request(model, (EVEN, EVEN), LONG)).plan
    assert len(plan.replicas) == 2, "two equal devices are two replicas"
    rates: list[tuple[float, float]] = []
    async with serving(plan) as deployment, clients_of(deployment) as clients:
        for number in range(LOSSES):
            pair = []
            for loses in (False, True):
                pair.append(await survivors_rate(deployment, clients, number, loses=loses))
                await asyncio.sleep(SETTLE_SECONDS)  # all are back
                await clients.answer(answer=2)
            rates.append((pair[0], pair[1]))
    without, with_loss = (statistics.mean(each) for each in zip(*rates, strict=True))
    print("tokens/s of the other replica without and with a loss:", ", ".join(f"{a:.0f} {b:.0f}" for a, b in rates))
    return Row("layout_loss", with_loss, "tokens/s", "the same seconds without", without, with_loss / without, 0.97)


@dataclass(frozen=True)
class Promise:
    """A plan for a deadline and a rate, and the requests that come at that rate."""

    request: PlanRequest
    plan: Plan
    trace: tuple[Request, ...]

    @property
    def deadline(self) -> float:
        assert self.request.objective.deadline_seconds is not None
        return self.request.objective.deadline_seconds

    def simulated(self, routing: Routing = least_loaded) -> float:
        request = self.request
        replicas = fleet(self.plan, request.model, request.cluster, Latencies(request.latency_sources))
        return simulate(replicas, self.trace, routing).attainment_of_latency(self.deadline)


def promised(model: Path) -> Promise:
    """The rate is a share of what the replicas can do; the deadline a multiple of what an answer takes there."""
    request = plan_request(model, (FAST, SLOW))
    told = make_plan(request).plan.prediction
    rate = LOAD * told.tokens_per_second / ANSWER
    seconds = PATIENCE * (told.ttft_ms + (ANSWER - 1) * told.tpot_ms) / 1e3
    request = replace(request, objective=Objective("slo", seconds, rate))
    plan = make_plan(request).plan
    assert len(plan.replicas) == 2, "the slow device is needed for the rate"
    trace = poisson(
        rate, round(rate * TRACE_SECONDS), range(PROMPT // 2, 3 * PROMPT // 2), range(ANSWER // 2, 3 * ANSWER // 2), 1
    )
    return Promise(request, plan, trace)


async def _in_time(promise: Promise, gateway: str) -> float:
    async with serving(promise.plan, gateway) as deployment, clients_of(deployment) as clients:
        await asyncio.gather(*(clients.answer(answer=2) for _ in range(IN_FLIGHT)))  # shapes that are made once
        with held(deployment, (FAST, SLOW)):
            seconds = await clients.follow(promise.trace)
    return sum(each <= promise.deadline for each in seconds) / len(seconds)


async def _route(model: Path) -> list[Row]:
    promise = promised(model)
    turn = itertools.count()
    expected = promise.simulated(), promise.simulated(lambda loads: loads[next(turn) % len(loads)].replica)
    routed = await _in_time(promise, "strata_runtime.gateway.__main__")
    in_turn = await _in_time(promise, "benchmarks.in_turn")
    rates = [replica.decode_rate for replica in promise.plan.replicas]
    asked = promise.request.objective.requests_per_second
    print(
        f"{len(promise.trace)} requests, {asked:.1f} a second, within {promise.deadline:.2f} s; planned rates of the replicas {rates}"
    )
    return [
        Row(name, good, "in time", "in turn", bad, good / bad if bad else None, 1.3)
        for name, good, bad in (("routing_planned_simulated", *expected), ("routing", routed, in_turn))
    ]


def measure(parts: Collection[str]) -> list[Row]:
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), SHAPE["vocab_size"])
        model = make_random_model(Path(folder), "llama", dtype=torch.bfloat16, **SHAPE)
        if "loss" in parts:
            rows.append(asyncio.run(_lose(model)))
        if "routing" in parts:
            rows += asyncio.run(_route(model))
    return rows


if __name__ == "__main__":
    asked = [each for each in sys.argv[1:] if each in PARTS]
    rest = [each for each in sys.argv[1:] if each not in PARTS]
    run(NAME, partial(measure, asked or PARTS), rest, part=bool(asked))
