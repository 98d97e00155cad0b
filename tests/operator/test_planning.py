"""Every field of the spec that planning consumes reaches the planner's question."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata_operator.decide.planning import request_for
from strata_planner.question.cluster import Cluster
from tests.operator.builders import a_deployment

CONFIG = json.loads((Path(__file__).parents[2] / "examples/models/strata-tiny/config.json").read_text(encoding="utf-8"))
CLUSTER = Cluster.from_yaml("nodes: [{name: a, devices: [{type: cpu, count: 2, memoryBytes: 900000000}]}]")

REACHES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "promptTokens": ({"workload": {"promptTokens": 40}}, "workload.prompt_tokens", 40),
    "outputTokens": ({"workload": {"outputTokens": 30}}, "workload.output_tokens", 30),
    "concurrency": ({"workload": {"concurrency": 5}}, "workload.concurrency", 5),
    "maxModelLen": ({"model": {"uri": "hf://a/b", "maxModelLen": 200}}, "max_model_len", 200),
    "qualityWeight": ({"objective": {"qualityWeight": 7.0}}, "theta", 7.0),
    "allowed": ({"precision": {"allowed": [4, 16]}}, "allowed_bits", (4, 16)),
    "method": ({"precision": {"method": "float8", "allowed": [8]}}, "formats", {8: ("fp8_e4m3",)}),
    "activationBits": ({"precision": {"allowed": [8], "activationBits": [8, 16]}}, "activation_bits", (8, 16)),
    "kvCacheBits": ({"precision": {"kvCacheBits": 8}}, "kv_bits", 8),
    "minStages": ({"placement": {"minStages": 2}}, "min_stages", 2),
    "maxStages": ({"placement": {"maxStages": 3}}, "max_stages", 3),
    "solver": ({"planning": {"solver": "transfer"}}, "solver", "transfer"),
    "timeLimitSeconds": ({"planning": {"timeLimitSeconds": 9}}, "time_limit_seconds", 9),
    "computeType": ({"runtime": {"computeType": "float32"}}, "compute_type", "float32"),
}


@pytest.mark.parametrize("name", REACHES)
def test_a_field_reaches_the_planner(name: str) -> None:
    spec, place, expected = REACHES[name]
    short = {"workload": {"promptTokens": 64, "outputTokens": 32}}
    found: Any = request_for(a_deployment().with_spec(**short).with_spec(**spec).build(), CLUSTER, CONFIG)
    for part in place.split("."):
        found = getattr(found, part)
    assert found == expected
