"""An epoch's record: what is written beside its plan comes back, and what another release wrote stops nothing."""

import base64
from dataclasses import replace
from typing import Any

import pytest

from strata_operator.api import LLMDeployment
from strata_operator.render.digest import spec_digest
from strata_operator.render.epoch import Epoch
from strata_operator.render.records import (
    SPEC_FILE,
    Cause,
    EpochRecord,
    as_planned,
    moment,
    read_record,
    record_objects,
)
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.replan.repair import RepairNote
from tests.operator.builders import a_deployment
from tests.operator.fakes import a_plan

CLUSTER = Cluster(nodes=(Node("a", (Device("cpu", memory_bytes=1 << 30),)),))
CAUSE = Cause("NodeLost", "digest", "inventory", "b", 0.125, without="w", margin=0.2, planned_in=3, renewals=2)


def stored(deployment: LLMDeployment, cause: Cause = CAUSE) -> tuple[dict[str, Any], dict[str, Any]]:
    """As the API server hands them back."""
    secret, config_map = record_objects(deployment, Epoch(7, "key", a_plan("a")), CLUSTER, cause)
    secret["data"] = {name: base64.b64encode(text.encode()).decode() for name, text in secret.pop("stringData").items()}
    config_map["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return secret, config_map


def recorded(deployment: LLMDeployment) -> EpochRecord:
    return read_record(*stored(deployment, Cause("Created", spec_digest(deployment), "inventory")))


def test_a_record_reads_back() -> None:
    record = read_record(*stored(a_deployment().build()))
    at = moment("2026-01-01T00:00:00.125Z")
    note = RepairNote("reshuffle", 12, 30, 1 << 30, 0.75, 4.5)
    repaired = replace(CAUSE, repair=note, gain=0.125, noticed=at, planned=at)
    assert read_record(*stored(a_deployment().build(), repaired)).cause == repaired
    assert (record.cause, record.planned_in, record.epoch.number) == (CAUSE, 3, 7)


def test_a_record_of_a_release_that_noted_less_is_read() -> None:
    secret, config_map = stored(a_deployment().build())
    notes = config_map["metadata"]["annotations"]
    for name in ("without", "memory-margin", "planned-in", "renewals"):
        del notes[f"strata.dev/{name}"]
    del config_map["data"][SPEC_FILE]
    record = read_record(secret, config_map)
    assert (record.cause.margin, record.planned_in, record.cause.renewals, record.spec) == (0.0, 7, 0, None)


def test_a_spec_that_another_release_wrote_is_left_out() -> None:
    secret, config_map = stored(a_deployment().build())
    config_map["data"][SPEC_FILE] = '{"model": {"uri": "file:///m"}, "notYetKnown": 1}'
    assert read_record(secret, config_map).spec is None


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"precision": {"allowed": [8]}}, id="precision"),
        pytest.param({"model": {"uri": "pvc://models/x", "maxModelLen": 4096}}, id="model"),
        pytest.param({"placement": {"minStages": 2, "exclude": ["b"]}}, id="placement"),
        pytest.param({"runtime": {"computeType": "float16"}}, id="compute-type"),
        pytest.param({"runtime": {"prefixCaching": False}}, id="prefix-caching"),
        pytest.param({"runtime": {"speculation": {"mode": "auto", "tokens": 2}}}, id="speculation"),
        pytest.param({"runtime": {"boundaryLog": {"maxMemory": "4Gi"}}}, id="boundary-log"),
        pytest.param({"replanning": {"takeover": {"shadow": {"maxMemory": "16Gi"}}}}, id="shadow"),
        pytest.param({"planning": {"overrides": {"linkGbps": 10.0}}}, id="planning"),
    ],
)
def test_a_deployment_is_had_as_it_was_planned_whatever_its_spec_says_now(spec: dict[str, Any]) -> None:
    before, now = a_deployment().with_spec(**spec).build(), a_deployment().with_spec(model={"maxModelLen": 999}).build()
    planned = as_planned(now, recorded(before))
    assert spec_digest(planned) == spec_digest(before) != spec_digest(now)
    assert planned.spec.model == before.spec.model


def test_what_no_plan_is_made_from_is_todays() -> None:
    now = a_deployment().with_spec(precision={"allowed": [4]}, runtime={"image": "runtime:2"}, paused=True).build()
    planned = as_planned(now, recorded(a_deployment().build()))
    assert (planned.spec.runtime.image, planned.spec.paused, planned.spec.precision.allowed) == (
        "runtime:2",
        True,
        (3, 4, 8, 16),
    )
