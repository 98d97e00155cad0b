"""Helix's cluster of 24 nodes with its per-layer tables (ASPLOS 2025 artifact). Part of `benchmarks.layouts`.

Offline as there: all requests are there at once, the tokens decoded within ten minutes count, simulated. Helix counts over its own trace: Azure's
conversations with prompts of at most 2,048 and answers of at most 1,024 tokens; we take the first requests of the same trace.
Its simulator is another than ours, with memory limits and batching of its own: the figure to compare with is therefore one
pipeline per type of device, its own baseline, in our simulator too.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from benchmarks.reference.published_tables import helix_table
from benchmarks.rows import Row
from strata_planner.costs.latency import Latencies
from strata_planner.costs.tables import LayerTables, TableShape
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts.genetic import Genome
from strata_planner.search.layouts.pool import Pool
from strata_planner.search.layouts.search import Layout, Wish, best_layout, laid, layout_plan
from strata_planner.simulate import Outcome, at_once, azure, fleet, simulate

FILE = Path(__file__).parent.parent / "examples" / "clusters" / "helix-cluster24.yaml"
DEVICES = {"a100": "A100-40GB", "l4": "L4", "t4": "T4"}
PUBLISHED = {"Helix": 252.1, "Swarm": 124.7, "separate pipelines": 124.3}
MOST_PROMPT, MOST_ANSWER, REQUESTS = 2048, 1024, 2400
SECONDS = 600.0  # within which no replica runs out of requests
# The trace's mean lengths within those limits.
WORKLOAD = Workload(prompt_tokens=763, output_tokens=232, concurrency=384)


def helix_table_of(llama: Callable[[Cluster, Workload], PlanRequest], data: Path) -> tuple[Table, Row]:
    request = llama(Cluster.from_yaml(FILE.read_text(encoding="utf-8")), WORKLOAD)
    shape = TableShape.of(request.model.layers[0])
    tables = tuple(helix_table(data / "helix" / "llama2_70b" / name, shape, (kind,)) for name, kind in DEVICES.items())
    sources = (LayerTables(tables),)
    request = replace(request, latency_sources=sources, max_model_len=MOST_PROMPT + MOST_ANSWER)
    layout = best_layout(request, Wish())
    outcome = decoded(request, layout, data)
    by_type = decoded(request, laid(request, _by_type(request)), data)
    row = Row(
        "helix_decode",
        outcome.tokens_per_second,
        "tokens/s, simulated",
        "a pipeline per type, same simulator",
        by_type.tokens_per_second,
        ratio=outcome.tokens_per_second / by_type.tokens_per_second,
    )
    return _table(layout, outcome, by_type), row


def _by_type(request: PlanRequest) -> Genome:
    """A pipeline of all devices of each type, as Helix's baseline of separate pipelines."""
    classes = Pool(request.cluster).classes
    return tuple(
        tuple(len(each.devices) * (each.devices[0].type == kind) for each in classes) for kind in DEVICES.values()
    )


def decoded(request: PlanRequest, layout: Layout, data: Path) -> Outcome:
    replicas = fleet(layout_plan(layout), request.model, request.cluster, Latencies(request.latency_sources))
    trace = [
        each
        for each in azure(data / "traces" / "azure-2023-conversation.csv", limit=2 * REQUESTS)
        if each.prompt_tokens <= MOST_PROMPT and each.output_tokens <= MOST_ANSWER
    ]
    return simulate(replicas, at_once(trace[:REQUESTS]), horizon=SECONDS)


def _table(layout: Layout, outcome: Outcome, by_type: Outcome) -> Table:
    others = ", ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    shown = Table(
        title=f"Helix's 24 nodes: {outcome.tokens_per_second:.1f} tokens/s decoded, simulated; a pipeline per type "
        f"of device {by_type.tokens_per_second:.1f}, same simulator; published, another simulator: {others}",
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
