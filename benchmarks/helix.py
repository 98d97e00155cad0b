"""Helix's cluster of 24 nodes with its per-layer tables (ASPLOS 2025 artifact). Part of `benchmarks.layouts`.

Offline as there: all requests are there at once, decoded tokens a second count, simulated. Helix counts over its own trace: Azure's
conversations with prompts of at most 2,048 and answers of at most 1,024 tokens; we take the first requests of the same trace.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from benchmarks.rows import Row
from strata_planner.cluster import Cluster
from strata_planner.costs.latency import Latencies
from strata_planner.costs.published_tables import helix_table
from strata_planner.costs.tables import LayerTables, TableShape
from strata_planner.layout.search import Layout, Wish, best_layout, layout_plan
from strata_planner.request import PlanRequest
from strata_planner.simulate import Outcome, at_once, azure, fleet, simulate
from strata_planner.workload import Workload

FILE = Path(__file__).parent.parent / "examples" / "clusters" / "helix-cluster24.yaml"
DEVICES = {"a100": "A100-40GB", "l4": "L4", "t4": "T4"}
PUBLISHED = {"Helix": 252.1, "Swarm": 124.7, "separate pipelines": 124.3}
MOST_PROMPT, MOST_ANSWER, REQUESTS = 2048, 1024, 600
WORKLOAD = Workload(
    prompt_tokens=763, output_tokens=232, concurrency=96
)  # the trace's mean lengths within those limits


def helix_table_of(llama: Callable[[Cluster, Workload], PlanRequest], data: Path) -> tuple[Table, Row]:
    request = llama(Cluster.from_yaml(FILE.read_text(encoding="utf-8")), WORKLOAD)
    shape = TableShape.of(request.model.layers[0])
    tables = tuple(helix_table(data / "helix" / "llama2_70b" / name, shape, (kind,)) for name, kind in DEVICES.items())
    sources = (LayerTables(tables),)
    request = replace(request, latency_sources=sources, max_model_len=MOST_PROMPT + MOST_ANSWER)
    layout = best_layout(request, Wish())
    outcome = decoded(request, layout, data)
    row = Row(
        "helix_decode",
        outcome.tokens_per_second,
        "tokens/s, simulated",
        "Helix, its simulator, as published",
        PUBLISHED["Helix"],
        ratio=outcome.tokens_per_second / PUBLISHED["Helix"],
    )
    return _table(layout, outcome), row


def decoded(request: PlanRequest, layout: Layout, data: Path) -> Outcome:
    replicas = fleet(layout_plan(request, layout), request.model, request.cluster, Latencies(request.latency_sources))
    trace = [
        each
        for each in azure(data / "traces" / "azure-2023-conversation.csv", limit=4 * REQUESTS)
        if each.prompt_tokens <= MOST_PROMPT and each.output_tokens <= MOST_ANSWER
    ]
    return simulate(replicas, at_once(trace[:REQUESTS]))


def _table(layout: Layout, outcome: Outcome) -> Table:
    others = ", ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    shown = Table(
        title=f"Helix's 24 nodes: {outcome.tokens_per_second:.1f} tokens/s decoded, simulated; published: {others}",
        title_justify="left",
    )
    for column in ("replica", "devices", "layers", "sequences", "tokens/s, predicted"):
        shown.add_column(column)
    for number, each in enumerate(layout.replicas):
        devices = ", ".join(group.leader.node for group in each.order)
        shown.add_row(
            str(number),
            devices,
            "/".join(map(str, each.layers)),
            str(each.concurrency),
            f"{each.prediction.tokens_per_second:.1f}",
        )
    return shown
