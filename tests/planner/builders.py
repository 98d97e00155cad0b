"""Builders for the planner's tests: small models, devices with round numbers, requests with sensible defaults."""

from typing import Any

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.draft_head import DraftHead
from strata_planner.contract.formats import FORMAT_NAMES, FormatName
from strata_planner.contract.plan import Speculation
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.draft_head import head_model
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload

MIB = 1 << 20
CARD = "card"  # a device type of the tests' own: unlike a processor it takes little beside the model


def a_config(**changes: Any) -> dict[str, Any]:
    """A Llama of 6 layers with 1.3M parameters."""
    return {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    } | changes


def a_model(**changes: Any) -> Model:
    return Model.from_config(a_config(**changes))


def a_wide_model() -> Model:
    """Layers of 96 MiB at 16 bits: large enough that mixing precisions in a stage pays for what it costs."""
    return a_model(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8)


def a_profile(**changes: Any) -> DeviceProfile:
    """A slow processor without launch overhead, on which every format is as good as its bytes."""
    even: dict[FormatName, float] = dict.fromkeys(FORMAT_NAMES, 0.5)
    fields: dict[str, Any] = {
        "type": "cpu",
        "memory_bytes": 64 * MIB,
        "bandwidth_bytes_per_second": 1e9,
        "flops_per_second": 1e10,
        "float32_flops_per_second": 5e9,
        "decode_efficiency": even,
        "prefill_efficiency": even,
        "layer_overhead_seconds": 0.0,
        "source": "measured",
    }
    return DeviceProfile(**(fields | changes))


def a_cluster(*memory_mib: float, speeds: tuple[float, ...] = (), link: LinkRate | None = None) -> Cluster:
    """One card per node, named a, b, ..., with so many MiB for the model; `speeds` multiply its rates."""
    nodes = tuple(
        Node(chr(ord("a") + index), (_a_device(memory, speeds[index] if speeds else 1.0),))
        for index, memory in enumerate(memory_mib)
    )
    return Cluster(nodes, default_link=link or LinkRate(gbps=10, latency_ms=0.1), profiles={CARD: a_profile(type=CARD)})


def _a_device(memory_mib: float, speed: float) -> Device:
    rates = {"bandwidthBytesPerSecond": 1e9 * speed, "flopsPerSecond": 1e10 * speed}
    return Device(CARD, memory_bytes=int(memory_mib * MIB), usable_fraction=1.0, overhead_bytes=0, profile=rates)


def a_request(cluster: Cluster | None = None, **changes: Any) -> PlanRequest:
    fields: dict[str, Any] = {
        "deployment": "chat",
        "model_uri": "file:///models/small",
        "model": a_model(),
        "cluster": cluster or a_cluster(64, 64),
        "workload": Workload(prompt_tokens=32, output_tokens=16, concurrency=4),
        "max_model_len": 64,
    }
    return PlanRequest(**(fields | changes))


HEAD = head_model(
    DraftHead.from_config(
        {
            "hidden_size": a_model().hidden_size,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "vocab_size": a_model().vocab_size,
            "draft_vocab_size": 64,
        }
    )
)
EAGLE = Speculation("eagle", 4, draft_uri="file:///models/head", fused=(1, 2))
