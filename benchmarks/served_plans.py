"""Plans of low and mixed bits, made with a measured profile and run on slots of one thread and one core each: the end-to-end part of `benchmarks.costs`.

Predicted is what the planner's simulator makes of the plan, its costs and the load; the plan's own figure, in closed form, stands beside it.
"""

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.slots import SlotProcess, slot_processes
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Plan
from strata_planner.costs.latency import Latencies
from strata_planner.costs.source import LatencySource
from strata_planner.question.cluster import CPU_USABLE_FRACTION, Cluster, Device, LinkRate, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanRequest, make_plan
from strata_planner.simulate import Request, fleet, simulate
from strata_runtime.measuring.measure import measure as measure_device
from strata_runtime.measuring.served import processor_seconds
from strata_runtime.wire.client import LeaderClient, PipelineClient, greedy


@dataclass(frozen=True)
class Case:
    """A plan to run: its load, and the share of its 16-bit weights that each of the two devices has room for."""

    name: str
    workload: Workload
    shares: tuple[float, float]
    allowed_bits: tuple[int, ...]


CASES = (
    Case("8 sequences", Workload(64, 64, 8), (0.42, 0.42), (3, 4, 8, 16)),
    Case("16 sequences", Workload(96, 48, 16), (0.75, 0.75), (8, 16)),
    Case("4 long prompts", Workload(384, 48, 4), (0.5, 0.7), (4, 16)),
    Case("2 sequences", Workload(100, 100, 2), (0.5, 0.35), (4, 8, 16)),
    Case("32 short prompts", Workload(32, 48, 32), (0.35, 0.4), (3, 8)),
    Case("6 sequences", Workload(200, 80, 6), (0.35, 0.6), (4, 8, 16)),
)


@dataclass(frozen=True)
class Account:
    """Of the whole batch: tokens per second, seconds to a sequence's first token on average, seconds that each stage computes."""

    tokens_per_second: float
    ttft_seconds: float
    busy_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Ran:
    """One plan: simulated, and as it ran (busy: processor time of the slots). `closed_form`: the plan's own tokens per second."""

    name: str
    bits: str
    source: str
    closed_form: float
    simulated: Account
    measured: Account

    @property
    def error(self) -> float:
        return self.simulated.tokens_per_second / self.measured.tokens_per_second - 1

    @property
    def ttft_error(self) -> float:
        return self.simulated.ttft_seconds / self.measured.ttft_seconds - 1

    @property
    def closed_form_error(self) -> float:
        return self.closed_form / self.measured.tokens_per_second - 1

    @property
    def busy_error(self) -> float:
        return sum(self.simulated.busy_seconds) / sum(self.measured.busy_seconds) - 1


def loopback() -> LinkRate:
    """Between two slots of this machine, assumed: a hop is a hundredth of a step here."""
    return LinkRate(gbps=8, latency_ms=0.15)


@functools.cache
def rates() -> DeviceProfile:
    """One thread of this machine: what the profile does not answer."""
    return measure_device("cpu", "cpu", threads=1, compute_type="bfloat16")


def plan_of(case: Case, model_path: Path, source: LatencySource) -> tuple[Plan, PlanRequest]:
    """Two stages, first with room for all of an even cut at 16 bits, then with `case.shares` of its weights."""
    request = PlanRequest(
        deployment="bench",
        model_uri=str(model_path),
        model=Model.from_folder(model_path),
        cluster=_cluster((4 << 30, 4 << 30)),
        workload=case.workload,
        max_model_len=case.workload.sequence_tokens,
        allowed_bits=(16,),
        min_stages=2,
        max_stages=2,
        latency_sources=(source,),
    )
    roomy = make_plan(request).plan.replicas[0].stages
    rooms = [
        int((stage.memory.total_bytes - (1 - share) * stage.memory.weights_bytes) / CPU_USABLE_FRACTION)
        for stage, share in zip(roomy, case.shares, strict=True)
    ]
    tight = replace(request, cluster=_cluster(rooms), allowed_bits=case.allowed_bits)
    return make_plan(tight).plan, tight


def _cluster(memory_bytes: Sequence[int]) -> Cluster:
    nodes = tuple(
        Node(f"n{place}", (Device("cpu", memory_bytes=size, threads=1),)) for place, size in enumerate(memory_bytes)
    )
    return Cluster(nodes, default_link=loopback()).with_profile(rates())


def run_plan(leader: LeaderClient, slots: Mapping[str, SlotProcess], workload: Workload, name: str) -> Account:
    """The whole batch at once."""
    submits = [
        greedy(
            f"{name}-{number}",
            [(7 * number + place) % 1000 for place in range(workload.prompt_tokens)],
            workload.output_tokens,
            salt=f"{name}-{number}",
        )
        for number in range(workload.concurrency)
    ]
    firsts: dict[str, float] = {}
    unfinished = len(submits)
    before = [processor_seconds(slot.process.pid) for slot in slots.values()]
    started = time.perf_counter()
    for submit in submits:
        leader.send(submit)
    while unfinished:
        for event in leader.events():
            firsts.setdefault(event.request, time.perf_counter() - started)
            unfinished -= event.finish is not None
    seconds = time.perf_counter() - started
    busy = (processor_seconds(slot.process.pid) - then for slot, then in zip(slots.values(), before, strict=True))
    tokens = workload.concurrency * workload.output_tokens
    return Account(tokens / seconds, statistics.mean(firsts.values()), tuple(busy))


def simulated(plan: Plan, request: PlanRequest) -> Account:
    load = request.workload
    replicas = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    outcome = simulate(replicas, [Request(0.0, load.prompt_tokens, load.output_tokens)] * load.concurrency)
    ttft = outcome.mean("ttft")
    assert ttft is not None
    return Account(outcome.tokens_per_second, ttft, outcome.replicas[0].busy_seconds)


def serve(case: Case, plan: Plan, request: PlanRequest, runs: int) -> Ran:
    with slot_processes(plan) as slots:
        leader = PipelineClient(slots).serve(plan)
        run_plan(leader, slots, case.workload, "warm")  # kernels are made for the steps' sizes as they first come
        accounts = [run_plan(leader, slots, case.workload, str(number)) for number in range(runs)]
    stages = plan.replicas[0].stages
    return Ran(
        case.name,
        " | ".join(_bits(stage.bits) for stage in stages),
        "; ".join(dict.fromkeys(stage.times.source for stage in stages)),
        plan.prediction.tokens_per_second,
        simulated(plan, request),
        sorted(accounts, key=lambda account: account.tokens_per_second)[runs // 2],
    )


def _bits(bits: Sequence[int]) -> str:
    return " ".join(f"{len(list(each))}x{value}" for value, each in groupby(bits))


def show_plans(ran: Sequence[Ran], console: Console) -> None:
    table = Table(title="plans that were run, the whole batch at once", title_justify="left")
    for column in (
        "",
        "layers x bits of each stage",
        "tokens/s",
        "measured",
        "error",
        "closed form",
        "TTFT s",
        "measured",
    ):
        table.add_column(column)
    table.add_column("busy s of the stages")
    table.add_column("measured")
    for each in ran:
        told, real = each.simulated, each.measured
        rates = (f"{told.tokens_per_second:.1f}", f"{real.tokens_per_second:.1f}", f"{each.error:+.1%}")
        ttft = (f"{told.ttft_seconds:.3f}", f"{real.ttft_seconds:.3f}")
        busy = (" ".join(f"{seconds:.2f}" for seconds in account.busy_seconds) for account in (told, real))
        table.add_row(each.name, each.bits, *rates, f"{each.closed_form:.1f}", *ttft, *busy)
    console.print(table)
    for source in dict.fromkeys(each.source for each in ran):
        console.print(f"seconds from: {source}", soft_wrap=True)
