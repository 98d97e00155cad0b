"""HexGen's Table 3 by its printed cost model and by ours; collectives by alpha and beta beside NCCL's measured ones.

`python -m benchmarks.communication [--json FILE]`, a few seconds. HexGen (ICML 2024, appendix B, Table 3) gives prefill and decode
seconds of Llama-2-70B on eight GPUs in four layouts, benchmarked and estimated, but names neither the GPUs nor the batch. So

    fitted   the printed formulas (`hexgen`) with the rates of least mean error, one set per phase: a linear program, so
             that no other rates are better. The error is what the formula cannot follow.
    ours     this planner's costs with the model's real shapes and nothing fitted, one sequence, on eight RTX 3090 Ti of one node.
             The paper's decode estimates follow its formula to 0.02 % with at least 775 GB/s of memory; of the GPUs that it
             rents in eights only this one (1,008) and the A100-40G have as much, and 25 us an exchange is not NVLink.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

import pulp
from rich.console import Console
from rich.table import Table

from benchmarks.reference.hexgen import Layout, PhaseName, Rates, Task, terms
from benchmarks.rows import Row, run
from strata_planner.costs.communication import (
    Exchange,
    hidden_states_bytes,
    hidden_states_seconds,
    layer_collectives,
    ring_seconds,
)
from strata_planner.costs.latency import Latencies
from strata_planner.costs.operators import OperatorTables
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Phase, decode_phase, prefill_phase
from strata_planner.costs.source import Rates as DeviceRates
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload

LAYOUTS = (Layout(8, 1), Layout(4, 2), Layout(2, 4), Layout(1, 8))
PHASES: tuple[PhaseName, ...] = ("prefill", "decode")
DEVICE = "RTX-3090Ti"
RATES = tuple(Rates.__dataclass_fields__)


@dataclass(frozen=True)
class Case:
    """One phase of one workload: seconds of the four layouts, as printed."""

    task: Task
    phase: PhaseName
    benchmarked: tuple[float, ...]
    estimated: tuple[float, ...]


SHORT, LONG = Task(80, 8192, 256, 32), Task(80, 8192, 512, 64)
TABLE_3 = (
    Case(SHORT, "prefill", (2.72, 3.79, 5.26, 8.04), (2.99, 3.85, 5.25, 7.83)),
    Case(SHORT, "decode", (2.43, 2.25, 3.29, 6.04), (2.46, 2.14, 3.04, 5.60)),
    Case(LONG, "prefill", (3.04, 4.16, 5.57, 8.27), (3.10, 4.10, 5.63, 8.49)),
    Case(LONG, "decode", (4.76, 4.32, 6.65, 12.4), (4.92, 4.28, 6.08, 11.2)),
)
Answers = dict[Case, tuple[float, ...]]

LLAMA_2_70B = Model.from_config({
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
})  # fmt: skip


def fitted(phase: PhaseName, column: Callable[[Case], Sequence[float]]) -> Rates:
    """The rates, none negative, with the least sum of relative errors over the phase's rows of `column`."""
    rows = [
        (terms(case.task, layout, phase), seconds)
        for case in TABLE_3
        if case.phase == phase
        for layout, seconds in zip(LAYOUTS, column(case), strict=True)
    ]
    scales = [max(factors[rate] / seconds for factors, seconds in rows) or 1.0 for rate in range(len(RATES))]
    problem = pulp.LpProblem("fit", pulp.LpMinimize)
    rates = [pulp.LpVariable(name, lowBound=0) for name in RATES]
    errors = [pulp.LpVariable(f"error_{number}", lowBound=0) for number in range(len(rows))]
    problem += pulp.lpSum(errors)
    for (factors, seconds), error in zip(rows, errors, strict=True):
        share = pulp.lpSum(rate * (f / scale / seconds) for rate, f, scale in zip(rates, factors, scales, strict=True))
        problem += share - 1 <= error
        problem += 1 - share <= error
    problem.solve(pulp.HiGHS(msg=False))
    found = [(rate.value() or 0.0) / scale for rate, scale in zip(rates, scales, strict=True)]
    return Rates(*found)


def by_formula(column: Callable[[Case], Sequence[float]]) -> Answers:
    rates = {phase: fitted(phase, column) for phase in PHASES}
    return {
        case: tuple(rates[case.phase].seconds(case.task, layout, case.phase) for layout in LAYOUTS) for case in TABLE_3
    }


def by_ours() -> Answers:
    return {case: tuple(_ours(case, layout) for layout in LAYOUTS) for case in TABLE_3}


def _ours(case: Case, layout: Layout) -> float:
    """All layers one after the other, their collectives, the hops between stages; of one sequence alone."""
    devices = Cluster((Node("one", (Device(DEVICE, count=8),)),))
    first, second, *_ = devices.accelerators()
    link = devices.link(first, second)
    load = Workload(case.task.input_tokens, case.task.output_tokens, 1)
    phase: Phase = prefill_phase(load, 1) if case.phase == "prefill" else decode_phase(load, 1)
    rates = DeviceRates(first.profile, "float16", 16, first.name)
    size = hidden_states_bytes(LLAMA_2_70B, phase.total_tokens, "float16")
    collectives = layer_collectives((), Exchange(first.name, layout.tensor, link, size)).seconds
    layers = (sharded(layer, layout.tensor) for layer in LLAMA_2_70B.layers)
    latencies = Latencies()
    once = sum(latencies.layer(layer, "dense", rates, phase).seconds + collectives for layer in layers)
    once += (layout.pipeline - 1) * hidden_states_seconds(LLAMA_2_70B, link, phase.total_tokens, "float16")
    return once * (1 if case.phase == "prefill" else case.task.output_tokens)


def error(answers: Answers, phases: Iterable[PhaseName] = PHASES) -> float:
    """Mean relative error against what the paper benchmarked."""
    wanted = set(phases)
    return fmean(
        abs(answer / seconds - 1)
        for case, found in answers.items()
        if case.phase in wanted
        for answer, seconds in zip(found, case.benchmarked, strict=True)
    )


def rankings(answers: Answers) -> float:
    """Share of the four columns whose layouts come in the order that was benchmarked."""

    def order(seconds: Sequence[float]) -> list[int]:
        return sorted(range(len(seconds)), key=seconds.__getitem__)

    return fmean(order(found) == order(case.benchmarked) for case, found in answers.items())


def shown(answers: dict[str, Answers]) -> Table:
    table = Table(title="HexGen's Table 3, seconds", title_justify="left")
    for column in ("in/out", "phase", "layout", "benchmarked", "its estimate", *answers):
        table.add_column(column, justify="left" if column in {"phase", "layout"} else "right")
    for case in TABLE_3:
        for place, layout in enumerate(LAYOUTS):
            numbers = (
                case.benchmarked[place],
                case.estimated[place],
                *(each[case][place] for each in answers.values()),
            )
            lengths = f"{case.task.input_tokens}/{case.task.output_tokens}"
            table.add_row(lengths, case.phase, str(layout), *(f"{number:.2f}" for number in numbers))
    return table


def collective_rows(tables: OperatorTables) -> list[Row]:
    """Alpha-beta over NCCL's measured all-reduce, geometric mean: 1 is as measured."""
    rows = []
    for device in ("A100-80GB", "H100", "L40S"):
        cluster = Cluster((Node("one", (Device(device, count=2),)),))
        link = cluster.link(*cluster.accelerators())
        for name, tokens in (("decode", 8), ("prefill", 2048)):
            size = hidden_states_bytes(LLAMA_2_70B, tokens, "bfloat16")
            ratios = [
                ring_seconds(Exchange(device, degree, link, size)) / measured.seconds
                for degree in (2, 4, 8)
                if (measured := tables.all_reduce(device, degree, size))
            ]
            rows.append(
                Row(
                    f"all_reduce_{device}_{name}",
                    geometric_mean(ratios),
                    "x NCCL (measured)",
                    peer="alpha-beta, 2, 4, 8",
                )
            )
    return rows


def measure() -> list[Row]:
    estimates = {case: case.estimated for case in TABLE_3}
    formula, ours = by_formula(lambda case: case.benchmarked), by_ours()
    console = Console(width=150)
    console.print(shown({"formula, fitted": formula, f"ours, {DEVICE}, not fitted": ours}))
    console.print(own_estimates())
    its = "its own estimates (published)"
    rows = [
        Row("hexgen_table3_error", error(formula), "mean relative, fitted", its, error(estimates)),
        Row("hexgen_table3_ranking", rankings(formula), "share of 4 columns, fitted", its, rankings(estimates)),
    ]
    rows += [
        Row(
            f"hexgen_table3_error_{phase}",
            error(formula, [phase]),
            "mean relative, fitted",
            its,
            error(estimates, [phase]),
        )
        for phase in PHASES
    ]
    rows += [Row(f"hexgen_table3_ours_{phase}", error(ours, [phase]), "mean relative, not fitted") for phase in PHASES]
    rows.append(Row("hexgen_table3_ours_ranking", rankings(ours), "share of 4 columns, not fitted"))
    tables = OperatorTables.installed()
    if tables is None:
        console.print("left out without the extra 'profiles': collectives beside NCCL's")
        return rows
    return rows + collective_rows(tables)


def own_estimates() -> str:
    """The rates that the paper's own decode estimates follow. Reading weights and multiplying by them are proportional to each
    other over the rows, and so are a hop's latency and its bytes: only their sums are known. All of the first is read as
    bandwidth here, which bounds the bandwidth from below.
    """
    answers, rates = by_formula(lambda case: case.estimated), fitted("decode", lambda case: case.estimated)
    per_byte = rates.scan + rates.operation * 24 / (12 * SHORT.value_bytes)
    hop = rates.hop_latency + rates.hop_byte * SHORT.hidden * SHORT.value_bytes
    missed = fmean(
        abs(found / estimate - 1)
        for case in TABLE_3
        if case.phase == "decode"
        for found, estimate in zip(answers[case], case.estimated, strict=True)
    )
    return (
        f"the paper's own decode estimates follow its formula within {missed:.2%} on average: at least {1e-9 / per_byte:.0f} GB/s, "
        f"{rates.tensor_latency * 1e6:.0f} us an exchange, {hop * 1e3:.1f} ms a hop"
    )


if __name__ == "__main__":
    run("communication", measure)
