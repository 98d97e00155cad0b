"""Rows of a benchmark: what was measured, beside which peer, against which goal. Shared by all benchmarks.

`run` is a benchmark's main: measure, print the table, write the JSON. `is_met` is the one place that says whether a goal is
reached. A listed row that is absent or has no value counts as not met.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Rows that were promised, by benchmark: what `run` looks for.
LISTED: dict[str, tuple[str, ...]] = {
    "engine": (
        *(
            f"{cell}_{bits}{mark}"
            for mark in ("", "_2_threads")
            for bits in ("16_bits", "8_bits", "8_bits_a8", "4_bits", "4_bits_a8")
            for cell in ("decode_1", "decode_16", "prefill_512")
        ),
        *(f"threads_{cell}_{bits}_bits" for bits in (16, 8, 4) for cell in ("decode_1", "decode_16", "prefill_512")),
        *(f"bandwidth_share_{bits}_bits{mark}" for mark in ("", "_2_threads") for bits in (16, 8, 4, 3)),
        *(
            f"eight_never_slower_{cell}{mark}"
            for mark in ("", "_2_threads")
            for cell in ("decode_1", "decode_16", "prefill_512")
        ),
        *("gateway_cost_16", "gateway_cost_64"),
    ),
    "ranks": (
        *(
            "all_reduce_us_4_kb",
            "all_reduce_us_256_kb",
            "routing_simulated",
            "uneven_memory",
            "uneven_logits",
            "memory_of_two_cores",
        ),
        *(f"tp2_{over}{cell}" for cell in ("decode_1", "decode_16", "prefill") for over in ("", "over_threads2_")),
    ),
    "replicas": ("layout_loss", "routing_planned_simulated", "routing"),
    "hexgen_run": ("hexgen_case_run_decode", "hexgen_case_run_prompts"),
    "loss": ("loss_next_token", "loss_every_stream", "loss_requests", "loss_doubled", "perplexity_after"),
    "strategies": ("strategy_choice", "strategy_gain"),
    "start": ("slot_memory", "slot_resident", "deployment_memory", "ready_seconds"),
    "pipeline": (
        "overlap",
        "overlap_ragged",
        "hop_latency",
        "generate_1",
        "generate_16",
        "memory",
        "recovery_seconds",
        "plan_cluster_3",
        "plan_cluster_5",
    ),
    "serving": tuple(
        f"{name}{mark}"
        for mark in ("", "_2_stages")
        for name in (
            *("prefix_ttft", "chat_capacity", "short_behind_long", "stall", "spec_ngram", "spec_eagle"),
            *(f"spec_never_worse_{streams}" for streams in (1, 4, 16, 64)),
            *(f"structured_{streams}" for streams in (1, 16)),
        )
    ),
    "self_drafts": tuple(
        f"spec_self_{name}_{bits}{mark}" for name in ("tiny", "1b") for bits in (16, 8) for mark in ("", "_3_stages")
    ),
    "streams": ("streams_500_errors", "streams_500_growth", "streams_500_gap", "streams_500_rate"),
    "transcripts": ("transcript_schema", "transcript_tool"),
    "planner": (
        "clusters_mean_seconds",
        "clusters_worst_seconds",
        "clusters_gap",
        "bruteforce_equal",
        "ilp_never_better",
        "planned_over_even",
        "planner_memory_bytes",
        "import_seconds",
        "hexgen_seconds",
        "hexgen_replan_seconds",
        "hexgen_attainment",
        "fleet_1000_seconds",
        "fleet_1000_gap",
    ),
    "costs": (
        "memory_error",
        "memory_error_ranks",
        "latency_error",
        "latency_error_ranks",
        "end_to_end_error",
        "indicator_correlation_ratio",
        "indicator_time_ratio",
    ),
    "fleets": (
        "mixed_gap_mean",
        "mixed_gap_worst",
        "mixed_first_mean",
        "mixed_first_worst",
        "predicted_over_simulated",
        "predicted_over_simulated_worst",
        "never_beaten",
    ),
    "helix_simulator": ("helix_24", "plan_seconds_24"),
    "local_fleets": ("simulated_over_measured",),
    "simulation": ("simulator_error",),
    "silicon": ("silicon",),
    "kernels": (
        *(f"matvec_k{bits}" for bits in range(3, 9)),
        "matvec_proportional",
        "matvec_over_int4pack",
        "gemm_16_a16",
        "gemm_64_a16",
        "gemm_16_a8",
        "gemm_64_a8",
        "gpu_matvec_k4",
        "gpu_monotone",
    ),
    "loading": ("load_time", "load_peak_memory"),
    "quality": (
        "nested_over_separate_k3",
        "nested_over_separate_k4",
        "sensitivity_ordered",
        "quantize_seconds_per_parameter",
        *(f"upscaling_error_k{bits}" for bits in range(3, 9)),
    ),
    "precision_switch": ("switch_milliseconds_per_layer", "switch_memory_returned"),
    "plan_clusters": ("plan_cluster_3", "plan_cluster_5"),
    "node_loss": (
        "node_loss_seconds",
        *(f"node_loss_{step}" for step in ("noticed", "planned", "prepared", "committed")),
    ),
    "cluster_faults": (
        *(f"cluster_{name}_{row}" for name in ("drain", "grow_back") for row in ("pause_ms", "lost", "equal")),
        *(f"cluster_operator_dies_{row}" for row in ("pause_ms", "lost", "equal")),
        *(f"cluster_api_away{mark}_{row}" for mark in ("", "_with_orders") for row in ("next_token", "lost", "equal")),
    ),
    "kills": ("lost_requests", "doubled_tokens", "survivor_restarts"),
    "hostile": (
        "crashes",
        "epochs_by_strangers",
        "memory_growth_bytes",
        "longest_pause_seconds",
        "beside_failures",
        "server_errors",
        "complaints",
    ),
    "soak": ("tokens_lost_or_doubled", "requests_failed", "kv_left", "memory_bytes_per_minute"),
}


@dataclass(frozen=True)
class Row:
    """One figure. A goal is one of `ratio` where there is a ratio, else of `value`; without a goal the row is reported."""

    name: str
    value: float | None
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    lower_is_better: bool = False

    @property
    def met(self) -> bool:
        return is_met(self)

    def as_json(self) -> dict[str, object]:
        keys = ("name", "value", "unit", "peer", "peer_value", "ratio", "goal", "met")
        return {key: getattr(self, key) for key in keys}


def is_met(row: Row) -> bool:
    """Whether the row has a value and reaches its goal, if it has one."""
    if row.value is None:
        return False
    if row.goal is None:
        return True
    judged = row.value if row.ratio is None else row.ratio
    return judged <= row.goal if row.lower_is_better else judged >= row.goal


def with_absent(rows: Sequence[Row], listed: Sequence[str]) -> list[Row]:
    """The rows, and an empty one for each listed name that is not among them."""
    names = {row.name for row in rows}
    return [*rows, *(Row(name, None, "absent") for name in listed if name not in names)]


def table(title: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("row")
    for column in ("value", "unit", "peer", "peer value", "ratio", "goal", "met"):
        shown.add_column(column, justify="left" if column in {"unit", "peer"} else "right")
    for row in rows:
        sign = "<=" if row.lower_is_better else ">="
        goal = "reported" if row.goal is None else f"{sign} {row.goal:g}"
        met = "yes" if row.met else "no"
        shown.add_row(
            row.name,
            _number(row.value),
            row.unit,
            row.peer or "",
            _number(row.peer_value),
            _number(row.ratio),
            goal,
            met,
        )
    return shown


def run(
    name: str, measure: Callable[[], Sequence[Row]], arguments: Sequence[str] | None = None, *, part: bool = False
) -> list[Row]:
    """The main of a benchmark: measures, prints, writes `--json FILE`. `part`: not all that is listed was to be measured."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    chosen = parser.parse_args(arguments)
    rows = with_absent(measure(), () if part else LISTED.get(name, ()))
    Console(width=150).print(table(name, rows))
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n", encoding="utf-8")
    return rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"
