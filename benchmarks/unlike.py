"""What a share per device gains on nodes of unlike devices: tokens a second, predicted, of stages and replicas of one device or of equal ones each, of one group
with equal shares, and of the plan. `python -m benchmarks.unlike [--quick]`; nothing is timed.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from strata_planner.contract.plan import Stage
from strata_planner.contract.shares import equal, told
from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import Cluster, Device, DeviceGroup, Node
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.layouts.solved import nearly_solved
from strata_planner.search.planning import make_plan

_GIGABYTE = 10**9
_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192}
MODELS = {
    "1B": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70B": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def _cores(threads: int, gigabytes: int) -> Device:
    rates = {"bandwidthBytesPerSecond": 8e9 * threads, "flopsPerSecond": 8e10 * threads}
    return Device("cpu", threads=threads, memory_bytes=gigabytes * _GIGABYTE, profile=rates)


NODES: dict[str, tuple[str, tuple[Device, ...]]] = {
    "4 and 2 cores": ("1B", (_cores(4, 16), _cores(2, 16))),
    "6 and 2 cores": ("1B", (_cores(6, 16), _cores(2, 16))),
    "4 cores with 8 GB, 4 with 20": ("8B", (_cores(4, 8), _cores(4, 20))),
    "RTX 4090 and 3090": ("8B", (Device("RTX-4090"), Device("RTX-3090"))),
    "A100 of 80 and of 40 GB": ("70B", (Device("A100-80GB"), Device("A100-40GB"))),
    "2 A6000 and 2 3090": ("70B", (Device("RTX-A6000", count=2), Device("RTX-3090", count=2))),
}


def asked(model: str, devices: tuple[Device, ...], sequences: int) -> PlanRequest:
    return PlanRequest(
        deployment="bench",
        model_uri="file:///bench",
        model=Model.from_config(MODELS[model]),
        cluster=Cluster((Node("a", devices),)),
        workload=Workload(prompt_tokens=256, output_tokens=128, concurrency=sequences),
        max_model_len=2048,
        allowed_bits=(8,),
        tensor_parallel=(1, 2, 4),
        time_limit_seconds=30.0,
    )


def apart(request: PlanRequest) -> float | None:
    """Without groups of unlike devices: of the degrees that a node's classes make alone."""
    most = max(device.count for node in request.cluster.nodes for device in node.devices)
    alone = replace(request, tensor_parallel=tuple(each for each in request.tensor_parallel if each <= most))
    if most > 1:  # pairs of unlike devices would be taken too
        return max(filter(None, map(_rate, (replace(alone, tensor_parallel=(1,)), _named_apart(alone)))), default=None)
    return _rate(alone)


def _named_apart(request: PlanRequest) -> PlanRequest:
    """As if each type of devices lay on a node of its own, as near as in one."""
    nodes = tuple(Node(f"a{at}", (device,)) for at, device in enumerate(request.cluster.nodes[0].devices))
    link = request.cluster.link(*(request.cluster.accelerators()[at] for at in (0, -1)))
    return replace(request, cluster=Cluster(nodes, default_link=link))


def with_equal_shares(request: PlanRequest) -> float | None:
    """All devices as one group."""
    devices = request.cluster.accelerators()
    group = DeviceGroup(devices, equal(len(devices)))
    found = nearly_solved(request, (group,), request.workload.concurrency)
    return None if found is None else found.prediction.tokens_per_second


def _rate(request: PlanRequest) -> float | None:
    try:
        return make_plan(request).plan.prediction.tokens_per_second
    except InfeasibleError:
        return None


def _of(stage: Stage) -> str:
    shares = f" ({told(stage.shares)})" if stage.shares else ""
    return f"{stage.tensor_parallel}{shares}"


def rows(*, quick: bool) -> Iterator[tuple[str, ...]]:
    for name, (model, devices) in list(NODES.items())[: 1 if quick else None]:
        for sequences in (1,) if quick else (1, 8, 64):
            request = asked(model, devices, sequences)
            plan = make_plan(request).plan
            rates = (apart(request), with_equal_shares(request), plan.prediction.tokens_per_second)
            layout = "; ".join(", ".join(map(_of, replica.stages)) for replica in plan.replicas)
            figures = ("-" if each is None else f"{each:.4g}" for each in rates)
            gain = f"{rates[2] / rates[0]:.2f}" if rates[0] else "-"
            yield name, model, str(sequences), *figures, gain, layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one node, one load")
    known = parser.parse_args()
    table = Table(title="tokens/s, predicted; prompts of 256 and answers of 128 tokens, 8 bits", title_justify="left")
    for column in (
        "node",
        "model",
        "in flight",
        "apart",
        "equal shares",
        "plan",
        "plan / apart",
        "devices a stage (shares)",
    ):
        table.add_column(column)
    for row in rows(quick=known.quick):
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
