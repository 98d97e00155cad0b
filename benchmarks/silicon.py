"""Predicted against published time per output token: serving engines on NVIDIA GPUs, dense models, one to eight devices.

`python -m benchmarks.silicon [--cells FILE] [--json FILE]`, some two minutes; needs the extra `profiles`. Every measured load is asked
twice, by the operator tables as its engine runs them: what the plan predicts, and what the simulator gives in a closed loop of as many
clients. Nothing is fitted to a measured load. `--cells` writes every load to a csv file.
"""

import argparse
import csv
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.reference.silicon_samples import Sample, model_of, samples
from benchmarks.rows import Row, run
from strata_planner.contract.kv import kv_token_bytes
from strata_planner.contract.plan import MicroBatch
from strata_planner.costs.communication import Exchange, hidden_states_bytes, layer_collectives
from strata_planner.costs.latency import Latencies
from strata_planner.costs.operator_data import ENGINES
from strata_planner.costs.operators import OperatorTables
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Phase, Rates
from strata_planner.question.catalogue import catalogue
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.phases import Pair
from strata_planner.search.layouts.solved import SolvedReplica
from strata_planner.search.planning import make_plan
from strata_planner.search.prediction import predict
from strata_planner.simulate import Limits, Request, fleet, simulate

GOAL = 0.10
WAVES, SEED = 4, 7  # so many requests of each client
WORST = 20
_MEMORY_SHARE = 0.9  # of a device, for weights and KV: vLLM's default
_AT_LEAST = 16384  # prompt tokens of a batch when it is asked how fast prompts can be computed at most


@dataclass(frozen=True)
class Cell:
    """Milliseconds: as plans are predicted, as the simulator's closed loop gives."""

    sample: Sample
    planned_tpot: float
    simulated_tpot: float
    simulated_ttft: float

    @property
    def planned_error(self) -> float:
        return self.planned_tpot / self.sample.tpot_ms - 1

    @property
    def error(self) -> float:
        return self.simulated_tpot / self.sample.tpot_ms - 1

    @property
    def ttft_error(self) -> float:
        return self.simulated_ttft / self.sample.ttft_ms - 1

    @property
    def latency_error(self) -> float:
        """Of a whole request, which does not depend on who waits for whom."""
        after = self.sample.output_tokens - 1
        measured = self.sample.ttft_ms + after * self.sample.tpot_ms
        return (self.simulated_ttft + after * self.simulated_tpot) / measured - 1


def cell(sample: Sample, tables: OperatorTables) -> Cell:
    request = _request(sample, replace(tables, engine=sample.framework))
    outcome = make_plan(request)
    [planned] = fleet(outcome.plan, request.model, request.cluster, Latencies(request.latency_sources))
    replica = replace(planned, limits=_limits(sample, planned.limits))
    requests = drawn(WAVES * sample.concurrency, sample.prompt_tokens, sample.output_tokens, sample.shortest, SEED)
    simulated = simulate([replica], requests, in_flight=sample.concurrency)
    ttft, tpot = (1e3 * (simulated.mean(metric) or 0.0) for metric in ("ttft", "tpot"))
    return Cell(sample, _predicted_tpot(sample, outcome.replicas[0]), tpot, ttft)


def drawn(count: int, prompt_tokens: int, output_tokens: int, shortest: float, seed: int) -> tuple[Request, ...]:
    """Requests whose lengths are drawn evenly from `shortest` of the nominal ones to all of them."""
    draw = random.Random(seed)
    lengths = (
        [draw.randint(int(shortest * tokens), tokens) for tokens in (prompt_tokens, output_tokens)]
        for _ in range(count)
    )
    return tuple(Request(0.0, prompt, output) for prompt, output in lengths)


def _predicted_tpot(sample: Sample, planned: SolvedReplica) -> float:
    """Milliseconds by the formula of plans, for the engine's steps and the lengths that requests have in the mean."""
    mean = (1 + sample.shortest) / 2
    load = Workload(round(mean * sample.prompt_tokens), max(2, round(mean * sample.output_tokens)), sample.concurrency)
    pricer = Pricer(replace(planned.request, workload=load))
    pair = Pair(sample.concurrency, sample.concurrency, sample.step_tokens)
    candidate = Candidate(planned.order, pair)
    found = Found(candidate, pricer.problem(candidate), planned.found.solution)
    return predict(pricer, found).tpot_ms


def _request(sample: Sample, tables: OperatorTables) -> PlanRequest:
    dense = sample.format_name == "dense"
    return PlanRequest(
        deployment="bench",
        model_uri=sample.model,
        model=model_of(sample.model),
        cluster=Cluster((Node("n", tuple(Device(sample.device) for _ in range(sample.tensor_parallel))),)),
        workload=Workload(sample.prompt_tokens, sample.output_tokens, sample.concurrency),
        max_model_len=sample.prompt_tokens + sample.output_tokens,
        allowed_bits=(16,) if dense else (8,),
        activation_bits=(16,) if dense else (16, 8),
        method="roundToNearest" if dense else "float8",
        kv_bits=sample.kv_bits,
        max_stages=1,
        max_replicas=1,
        latency_sources=(tables,),
        solver="layout",
        tensor_parallel=(sample.tensor_parallel,),
    )


def _limits(sample: Sample, planned: Limits) -> Limits:
    """The engine's instead of the plan's: all sequences in one step, and KV in what the weights leave."""
    model = model_of(sample.model)
    weights = sum(each.weight_bytes(sample.format_name, "bfloat16") for layer in model.layers for each in layer.linears)
    weights += 2 * 2 * model.vocab_size * model.embedding_size  # embedding and head, 16 bits each
    layer = sharded(model.layers[0], sample.tensor_parallel)
    token = model.num_layers * kv_token_bytes(sample.kv_bits, layer.kv_heads, layer.head_dim, "bfloat16")
    left = _MEMORY_SHARE * catalogue().profile(sample.device).memory_bytes - weights / sample.tensor_parallel
    batch = MicroBatch(sample.concurrency, sample.concurrency, max(sample.step_tokens, sample.concurrency))
    return replace(planned, micro_batch=batch, page_budget=int(left / token) // planned.page_tokens)


def busy_with_prompts(sample: Sample, tables: OperatorTables) -> float:
    """The share of its time that the devices computed prompts if what was published holds: requests a second by Little's law, times
    what a prompt takes by the fastest engine's kernels. Above 1 the load was another one: prompts came from a cache, say.
    """
    mean = (1 + sample.shortest) / 2
    latency = (sample.ttft_ms + (mean * sample.output_tokens - 1) * sample.tpot_ms) * 1e-3
    least = min(_prompt_seconds(sample, mean, replace(tables, engine=engine)) for engine in ENGINES)
    return sample.concurrency / latency * least


def _prompt_seconds(sample: Sample, mean: float, tables: OperatorTables) -> float:
    model, profile = model_of(sample.model), catalogue().profile(sample.device)
    tokens = int(mean * sample.prompt_tokens)
    count = -(-_AT_LEAST // tokens)
    layer = sharded(model.layers[0], sample.tensor_parallel)
    rates = Rates(profile, "bfloat16", sample.kv_bits, sample.device)
    one = tables.layer(layer, sample.format_name, rates, Phase(count, tokens, tokens / 2))
    if one is None:
        return float("inf")
    size = hidden_states_bytes(model, count * tokens, "bfloat16")
    exchange = Exchange(sample.device, sample.tensor_parallel, LinkRate(), size)
    moved = layer_collectives((tables,), exchange).seconds if sample.tensor_parallel > 1 else 0.0
    return model.num_layers * (one.seconds + moved) / count


def contradicted(cells: Iterable[Cell], tables: OperatorTables) -> dict[str, int]:
    """Groups with loads that cannot have been as stated, and how many: nothing can be said of the group's others either."""
    counts: dict[str, int] = {}
    for each in cells:
        if busy_with_prompts(each.sample, tables) > 1:
            counts[each.sample.group] = counts.get(each.sample.group, 0) + 1
    return counts


def mean_error(cells: Iterable[Cell], error: Callable[[Cell], float] = lambda each: each.error) -> float | None:
    errors = [abs(error(each)) for each in cells]
    return statistics.mean(errors) if errors else None


def rows(cells: Sequence[Cell], without: Iterable[str]) -> list[Row]:
    """`silicon`: held-out loads in closed loop, less the groups `without`, which only `silicon_all` has."""
    held_out = [each for each in cells if each.sample.held_out]
    counted = [each for each in held_out if each.sample.group not in without]
    largest = max((abs(each.error) for each in counted), default=None)
    return [
        Row("silicon", mean_error(counted), "share", goal=GOAL, lower_is_better=True),
        Row("silicon_worst", largest, "share"),
        Row("silicon_latency", mean_error(counted, lambda each: each.latency_error), "share"),
        Row("silicon_ttft", mean_error(counted, lambda each: each.ttft_error), "share"),
        Row("silicon_plan", mean_error(counted, lambda each: each.planned_error), "share"),
        Row("silicon_all", mean_error(held_out), "share"),
        Row("silicon_tuned", mean_error(each for each in cells if not each.sample.held_out), "share"),
    ]


def group_table(cells: Sequence[Cell], without: dict[str, int]) -> Table:
    shown = Table(title="time per output token, predicted over published", title_justify="left")
    for column in (
        "model, device, engine",
        "loads",
        "closed loop",
        "mean error",
        "worst",
        "latency",
        "TTFT",
        "plan",
        "",
    ):
        shown.add_column(column, justify="left" if column in {"model, device, engine", ""} else "right")
    for name, grouped in groupby(sorted(cells, key=_group), key=_group):
        each = list(grouped)
        worst = max((one.error for one in each), key=abs)
        note = "" if each[0].sample.held_out else "looked at"
        if name in without:
            note = f"{without[name]} loads that cannot have been as stated"
        figures = [
            f"{statistics.mean(one.error for one in each):+.1%}",
            f"{mean_error(each):.1%}",
            f"{worst:+.0%}",
            f"{mean_error(each, lambda one: one.latency_error):.1%}",
            f"{mean_error(each, lambda one: one.ttft_error):.0%}",
            f"{mean_error(each, lambda one: one.planned_error):.1%}",
        ]
        shown.add_row(name, str(len(each)), *figures, note)
    return shown


def _group(each: Cell) -> str:
    return each.sample.group


def worst_table(cells: Sequence[Cell]) -> Table:
    shown = Table(title=f"the {WORST} worst of those that count", title_justify="left")
    for column in ("load", "published ms", "closed loop", "error", "plan", "TTFT published", "closed loop"):
        shown.add_column(column, justify="left" if column == "load" else "right")
    for each in sorted(cells, key=lambda one: -abs(one.error))[:WORST]:
        sample = each.sample
        load = f"{sample.group}, TP {sample.tensor_parallel}, {sample.prompt_tokens}/{sample.output_tokens}"
        figures = (sample.tpot_ms, each.simulated_tpot, each.error, each.planned_tpot)
        measured, simulated, error, planned = figures
        shown.add_row(
            f"{load}, {sample.concurrency} clients",
            f"{measured:.2f}",
            f"{simulated:.2f}",
            f"{error:+.0%}",
            f"{planned:.2f}",
            f"{sample.ttft_ms:.0f}",
            f"{each.simulated_ttft:.0f}",
        )
    return shown


def write_cells(cells: Iterable[Cell], path: Path) -> None:
    """Every load, one line each: who, what, published and predicted milliseconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("tensor_parallel", "prompt_tokens", "output_tokens", "concurrency", "ttft_ms", "tpot_ms")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["group", *names, "simulated_ttft_ms", "simulated_tpot_ms", "planned_tpot_ms", "error"])
        for each in cells:
            facts = (getattr(each.sample, name) for name in names)
            predicted = (each.simulated_ttft, each.simulated_tpot, each.planned_tpot, each.error)
            writer.writerow([each.sample.group, *facts, *(f"{value:.4g}" for value in predicted)])


def measure(cells_file: Path | None = None) -> list[Row]:
    tables = OperatorTables.installed()
    if tables is None:
        _say("every row is skipped: the measurements and the operator tables are those of the extra `profiles`")
        return []
    covered, left_out = samples()
    for reason, count in left_out.items():
        _say(f"{count} measured loads left out: {reason}")
    cells = [cell(sample, tables) for sample in covered]
    if cells_file:
        write_cells(cells, cells_file)
    without = contradicted(cells, tables)
    console = Console(width=170)
    console.print(group_table(cells, without))
    console.print(worst_table([each for each in cells if each.sample.held_out and each.sample.group not in without]))
    return rows(cells, without)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--cells", type=Path, metavar="FILE")
    chosen, rest = parser.parse_known_args()
    run("silicon", lambda: measure(chosen.cells), rest)
