"""`strata simulate`: plans a deployment, runs the plan under a trace in virtual time, and shows what its users would see."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata_operator.commands.costs import latency_sources
from strata_operator.commands.inputs import read_question
from strata_operator.commands.profile import profiles_for
from strata_operator.errors import InvalidInputError
from strata_operator.local.run import Progress, interruptible, leave_on_signals, leaving_at_once, log_to
from strata_operator.local.view import FILE_WIDTH
from strata_planner.costs.latency import Latencies
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.simulate import Outcome, Request, azure, fleet, of_clients, poisson, scaled, simulate, within
from strata_planner.simulate.arrivals import lengths_of
from strata_planner.simulate.outcome import METRICS

_PERCENTS = (50, 90, 99)
_NAMES = {"ttft": "time to first token", "tpot": "time per output token", "latency": "whole answer"}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Which requests come when. `trace`: a file; without `rate` at its own times. `rate`: Poisson of the workload's lengths. `clients`: so many,
    each with the next request as soon as it has an answer; as many as the workload's concurrency where nothing else is said.
    """

    trace: Path | None
    rate: float | None
    requests: int | None
    seed: int
    clients: int | None = None

    def in_flight(self, workload: Workload) -> int | None:
        """None where requests come at times of their own."""
        alone = self.trace is None and self.rate is None
        return workload.concurrency if self.clients is None and alone else self.clients


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the command line was given. `objectives`: bounds on TTFT and TPOT in seconds."""

    deployment: Path
    cluster: Path | None
    arrivals: Arrivals
    objectives: tuple[float, float] | None
    costs: tuple[str, ...]
    as_json: bool
    measure: bool
    profile: Path | None


def run(options: SimulateOptions) -> None:
    """Raises what `commands.errors` knows."""
    log_to(Console(stderr=True))
    progress = Progress()
    progress.doing = "planning"
    leave_on_signals()
    with leaving_at_once(progress):
        _run(options, progress)


def _run(options: SimulateOptions, progress: Progress) -> None:
    if options.objectives and not all(0 < bound < float("inf") for bound in options.objectives):
        raise InvalidInputError(
            "strata simulate",
            [f"--slo {options.objectives[0]:g} {options.objectives[1]:g}: both must be above 0 and finite seconds"],
        )
    sources = latency_sources(options.costs)
    question = read_question(options.deployment, options.cluster, measure=options.measure)
    profiles = profiles_for(question, options.profile, kept=options.measure)
    request = replace(question.request, latency_sources=(*profiles, *sources))
    clients = options.arrivals.in_flight(request.workload)
    trace = trace_of(options.arrivals, request)
    plan = interruptible(lambda: make_plan(request)).plan
    progress.doing = "simulating"
    latencies = Latencies(request.latency_sources)
    replicas = fleet(plan, request.model, request.cluster, latencies)
    outcome = interruptible(lambda: simulate(replicas, trace, in_flight=clients))
    costs = sorted({stage.times.source for replica in plan.replicas for stage in replica.stages})
    if options.as_json:
        steady = {} if clients is None else {"steadyTokensPerSecond": outcome.steady_tokens_per_second(clients)}
        shown = {"costs": costs} | outcome.as_json() | steady | _objectives(outcome, options.objectives)
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
        return
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(latency_table(outcome), use_table(outcome))
    lines = [*_lines(outcome, options.objectives), f"seconds from: {'; '.join(costs)}"]
    if clients is not None:
        rate, told = outcome.steady_tokens_per_second(clients), plan.prediction.tokens_per_second
        lines.insert(
            0, f"a closed loop of {clients}: {rate:.1f} tokens/s while it is full; the plan predicts {told:.1f}"
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def trace_of(arrivals: Arrivals, request: PlanRequest) -> tuple[Request, ...]:
    """Raises WorkloadError for a wrong file or number, InvalidInputError for two ways to arrive."""
    if arrivals.rate is not None and arrivals.clients is not None:
        raise InvalidInputError(
            "strata simulate",
            [
                f"--rate {arrivals.rate:g} and --clients {arrivals.clients}: requests come at a rate or as others end; give one"
            ],
        )
    if arrivals.trace is not None:
        trace = azure(arrivals.trace, arrivals.requests)
        return trace if arrivals.rate is None else scaled(trace, arrivals.rate)
    load, count, most = request.workload, arrivals.requests, request.max_model_len
    clients = arrivals.in_flight(load)
    if clients is not None:
        return of_clients(clients, count or max(1000, 4 * clients), *lengths_of(load), arrivals.seed, most)
    assert arrivals.rate is not None, "else there are clients"
    if not (load.prompt_deviation or load.output_deviation):
        return poisson(arrivals.rate, count or 1000, load.prompt_tokens, load.output_tokens, arrivals.seed)
    unlike = poisson(arrivals.rate, count or 1000, *lengths_of(load), arrivals.seed)
    return tuple(within(each, most) for each in unlike)


def latency_table(outcome: Outcome) -> Table:
    """A row per figure that a user feels, in seconds."""
    table = Table(title=f"simulated: {len(outcome.requests)} requests in {outcome.seconds:.1f} s", title_justify="left")
    for name in ("seconds", "mean", *(f"p{percent}" for percent in _PERCENTS)):
        table.add_column(name, justify="left" if name == "seconds" else "right")
    for metric in METRICS:
        figures = (outcome.mean(metric), *(outcome.percentile(metric, percent) for percent in _PERCENTS))
        table.add_row(_NAMES[metric], *("" if each is None else f"{each:.4g}" for each in figures))
    return table


def use_table(outcome: Outcome) -> Table:
    """A row per replica: its share of the requests, how busy each stage was, how full its KV."""
    table = Table(title="replicas", title_justify="left")
    for name in ("replica", "requests", "steps", "busy, by stage", "KV at most", "computed again"):
        table.add_column(name, justify="left" if name.startswith("busy") else "right")
    for place, (use, shares) in enumerate(zip(outcome.replicas, outcome.utilisation, strict=True)):
        busy = " ".join(f"{share:.0%}" for share in shares)
        table.add_row(str(place), str(use.requests), str(use.steps), busy, f"{use.kv_peak:.0%}", str(use.preemptions))
    return table


def _lines(outcome: Outcome, objectives: tuple[float, float] | None) -> list[str]:
    lines = [f"simulated {outcome.tokens_per_second:.1f} tokens/s, {outcome.requests_per_second:.3g} requests/s"]
    refused = sum(each.replica is None for each in outcome.requests)
    if refused:
        lines.append(f"{refused} requests refused: longer than the plan's maxModelLen, or than its KV pages hold")
    if objectives:
        met, good = outcome.attainment(*objectives), outcome.goodput(*objectives)
        lines.append(
            f"{met:.1%} of the requests within {objectives[0]:g} s to the first token and {objectives[1]:g} s for each "
            f"other: goodput {good:.3g} requests/s"
        )
    return lines


def _objectives(outcome: Outcome, objectives: tuple[float, float] | None) -> dict[str, Any]:
    if objectives is None:
        return {}
    return {"attainment": outcome.attainment(*objectives), "goodputRequestsPerSecond": outcome.goodput(*objectives)}
