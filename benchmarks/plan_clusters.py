"""Seconds to plan the LLM-PQ paper's clusters, and the plans. `python -m benchmarks.plan_clusters [--json FILE] [--all]`.

Default workload of the paper: prompts of 512 tokens, 100 tokens generated, 32 sequences (arXiv 2403.01136, section 6.1). The
peer is the paper's own solving time (Table 10, Gurobi) for the same cluster. Predicted tokens/s are printed and are no
measurement: they rest on a roofline with assumed efficiencies, the paper's on 2023 kernels.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.rows import Row, run
from strata_planner.answer.explain import render_plan
from strata_planner.question.cluster import Cluster
from strata_planner.question.model import Model
from strata_planner.question.workload import Workload
from strata_planner.search.planning import PlanOutcome, PlanRequest, make_plan

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKLOAD = Workload(prompt_tokens=512, output_tokens=100, concurrency=32)
TIME_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class PaperCluster:
    """One row of the paper's Table 3, with theta of Table 9 and the solving time of Table 10."""

    number: int
    model: str
    theta: float
    paper_seconds: float

    @property
    def file(self) -> Path:
        return EXAMPLES / "clusters" / f"llm-pq-{self.number}.yaml"


LISTED = (PaperCluster(3, "opt-30b", 1, 2.78), PaperCluster(5, "opt-66b", 50, 9.92))
OTHERS = (
    PaperCluster(1, "opt-13b", 1, 0.30),
    PaperCluster(2, "opt-13b", 1, 0.30),
    PaperCluster(4, "opt-30b", 1000, 2.29),
    PaperCluster(6, "opt-66b", 100, 115.98),
    PaperCluster(7, "bloom-176b", 10, 44.30),
    PaperCluster(8, "bloom-176b", 10, 19.32),
    PaperCluster(9, "opt-30b", 1, 1.16),
    PaperCluster(10, "opt-66b", 1, 2.46),
    PaperCluster(11, "bloom-176b", 10, 3.40),
)


def request_for(which: PaperCluster) -> PlanRequest:
    """The cluster's model under the paper's default load, with the prior sensitivity."""
    return PlanRequest(
        deployment="paper",
        model_uri=f"file:///models/{which.model}",
        model=Model.from_folder(EXAMPLES / "models" / which.model, for_serving=False),
        cluster=Cluster.from_yaml(which.file.read_text(encoding="utf-8")),
        workload=WORKLOAD,
        max_model_len=WORKLOAD.sequence_tokens,
        theta=which.theta,
        compute_type="float16",
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )


def plan(which: PaperCluster) -> tuple[PlanOutcome, float]:
    """The plan of a cluster of the paper and the seconds it took."""
    request = request_for(which)
    started = time.perf_counter()
    outcome = make_plan(request)
    return outcome, time.perf_counter() - started


def measure(clusters: Sequence[PaperCluster] = LISTED) -> list[Row]:
    console = Console(width=150)
    rows = []
    for each in clusters:
        outcome, seconds = plan(each)
        console.print(f"\ncluster {each.number}, {each.model}, theta {each.theta:g}, theirs in {each.paper_seconds} s:")
        console.print(render_plan(outcome.plan, outcome))
        rows.append(
            Row(
                name=f"plan_cluster_{each.number}",
                value=seconds,
                unit="s",
                peer="LLM-PQ with Gurobi, as published",
                peer_value=each.paper_seconds,
                ratio=seconds / each.paper_seconds,
                lower_is_better=True,
            )
        )
    return rows


if __name__ == "__main__":
    everything = "--all" in sys.argv
    rest = [argument for argument in sys.argv[1:] if argument != "--all"]
    run("plan_clusters", lambda: measure((*LISTED, *OTHERS) if everything else LISTED), rest)
