"""The digest of what a plan is made from: another one leads to a new plan. Read and written with every epoch's record.

A field that a later release adds must not replan a fleet, so only what differs from its default is hashed: a deployment that
does not use the new field keeps its digest. Objects come from the API server with the schema's defaults filled in, so what
the user left out cannot be told from what he wrote out. Digests of 0.1.0, which hashed every field it had, still count.
"""

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from strata_operator.api import LLMDeployment
from strata_operator.api.spec import LLMDeploymentSpec, PlacementSpec, RuntimeSpec
from strata_operator.once import once_of_each

PLANNED_PARTS = ("model", "workload", "objective", "precision", "placement", "planning")  # of the spec
PLANNED_OF_RUNTIME = ("compute_type", "prefix_caching", "boundary_log", "speculation")

# Every field that 0.1.0 hashed, in its own order of parts; None: a value, else the fields below. Never to be changed.
_Fields = dict[str, "_Fields | None"]
_FIELDS_OF_0_1_0: _Fields = {
    "model": {
        "uri": None,
        "tokenSecretRef": {"name": None, "key": None},
        "cache": {"persistentVolumeClaim": None},
        "maxModelLen": None,
    },
    "workload": dict.fromkeys(("promptTokens", "outputTokens", "concurrency", "requestsPerSecond")),
    "objective": {
        "goal": None,
        "slo": {"ttftMs": None, "tpotMs": None},
        "qualityWeight": None,
        "maxPerplexityIncrease": None,
    },
    "precision": dict.fromkeys(("allowed", "method", "activationBits", "kvCacheBits")),
    "placement": dict.fromkeys(("nodeSelector", "tolerations", "exclude", "minStages", "maxStages", "tensorParallel")),
    "planning": {
        "solver": None,
        "timeLimitSeconds": None,
        "overrides": dict.fromkeys(("memoryMarginBytes", "usableMemoryFraction", "linkGbps")),
    },
}


def spec_digest(deployment: LLMDeployment) -> str:
    """Of the part of the spec that plans are made from."""
    return _digest_of(deployment.spec)


@once_of_each
def _digest_of(spec: LLMDeploymentSpec) -> str:
    said = {part: _said(getattr(spec, part)) for part in PLANNED_PARTS}
    said["runtime"] = _said_of_runtime(spec.runtime)
    said["placement"] = _said_of_placement(spec.placement)
    takeover = spec.replanning.takeover
    said["shadow"] = _said(takeover.shadow) if takeover.shadow else {}
    said["orders"] = {"wanted": True} if takeover.standing_orders else {}  # when they are carried out is in no plan
    return _hashed({part: fields for part, fields in said.items() if fields})


def same_spec(deployment: LLMDeployment, recorded: str) -> bool:
    """Whether a recorded digest, of this release or of 0.1.0, is that of the spec as it is now."""
    return recorded == spec_digest(deployment) or recorded == _digest_of_0_1_0(deployment.spec)


@once_of_each
def _digest_of_0_1_0(spec: LLMDeploymentSpec) -> str | None:
    """None where the spec says something that 0.1.0 did not know."""
    parts: list[Any] = []
    for name in PLANNED_PARTS:
        fields = _FIELDS_OF_0_1_0[name]
        assert fields is not None
        if not _knows(fields, _said(getattr(spec, name))):
            return None
        parts.append(_cut(fields, getattr(spec, name).model_dump(mode="json")))
    takeover = spec.replanning.takeover
    if _said_of_runtime(spec.runtime).keys() - {"compute_type"} or takeover.shadow or takeover.standing_orders:
        return None
    return _hashed([*parts, spec.runtime.compute_type])


def _said_of_runtime(runtime: RuntimeSpec) -> dict[str, Any]:
    said = runtime.model_dump(mode="json", exclude_defaults=True, by_alias=False)
    return {name: value for name, value in said.items() if name in PLANNED_OF_RUNTIME}


def _said_of_placement(placement: PlacementSpec) -> dict[str, Any]:
    """tensorParallel [1] was the default, which the API server wrote into every object; that nothing is said of it is new."""
    said = {"tensor_parallel": None, **_said(placement)}
    return said if said["tensor_parallel"] != [1] else {name: said[name] for name in said if name != "tensor_parallel"}


def _said(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(mode="json", exclude_defaults=True)


def _knows(fields: _Fields, said: dict[str, Any]) -> bool:
    return all(
        name in fields and (not isinstance(below := fields[name], dict) or _knows(below, value))
        for name, value in said.items()
    )


def _cut(fields: _Fields, dumped: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _cut(below, dumped[name]) if isinstance(below, dict) and isinstance(dumped[name], dict) else dumped[name]
        for name, below in fields.items()
    }


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
