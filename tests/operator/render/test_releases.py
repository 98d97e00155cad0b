"""What 0.1.0 left in a cluster is read by every later release, and a deployment that serves is not planned anew for it.

`fixtures/0.1.0` was written by that release: a deployment that serves its second epoch on three nodes. Never write it again.
"""

import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata_operator.api import deployment_from_object
from strata_operator.decide.actions import MakePlan
from strata_operator.decide.epochs import Observed
from strata_operator.decide.reconcile import reconcile
from strata_operator.decide.view import NodeView, View
from strata_operator.observe.snapshot import Snapshot
from strata_operator.render import digest
from strata_operator.render.digest import same_spec, spec_digest
from strata_operator.render.names import slot_address
from strata_operator.render.records import EpochRecord, UnreadRecord
from tests.laws import share
from tests.operator.fakes import FakeGateway, FakeSlot

FOLDER = Path(__file__).parent / "fixtures" / "0.1.0"

Object = dict[str, Any]


def stored(name: str) -> Object:
    return dict(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def snapshot_of(*config_maps: Object) -> Snapshot:
    secrets = tuple(stored(f"secret-chat-{name}") for name in ("epoch-1", "epoch-2", "control"))
    return Snapshot(config_maps=config_maps, secrets=secrets)


def records_of(*config_maps: Object) -> tuple[tuple[EpochRecord, ...], tuple[UnreadRecord, ...]]:
    return snapshot_of(*config_maps).records()


def both() -> tuple[Object, Object]:
    return stored("configmap-chat-epoch-1"), stored("configmap-chat-epoch-2")


def serving_view(thing: Object) -> View:
    """The deployment as it was: three slots and a gateway that serve epoch 2."""
    deployment = deployment_from_object(thing)
    records, _ = records_of(*both())
    names = [stage.slot for stage in records[-1].epoch.plan.stages]
    slots = {name: FakeSlot(name) for name in names}
    for slot in slots.values():
        slot.committed = 2
    gateway = FakeGateway()
    return View(
        now=datetime(2026, 12, 1, tzinfo=UTC),
        deployment=deployment,
        records=records,
        nodes={name: NodeView(name, None) for name in "abc"},
        pods=(),
        stateful_sets={name: datetime(2026, 11, 22, tzinfo=UTC) for name in names},
        templates=dict.fromkeys(names, ""),
        seen=Observed(
            {name: slot.status() for name, slot in slots.items()},
            {"gateway": gateway.status()},
            {name: slot_address(deployment, name) for name in names},
        ),
        inventory_digest=records[-1].cause.inventory_digest,
        devices=3,
        usable=frozenset("abc"),
        failures={},
        refused=(),
        manifests=(),
        applied=frozenset(),
    )


def plans(view: View) -> list[MakePlan]:
    return [action for action in reconcile(view) if isinstance(action, MakePlan)]


def test_its_deployment_status_and_epochs_are_read() -> None:
    deployment = deployment_from_object(stored("llmdeployment-chat"))
    assert (deployment.status.phase, deployment.status.committed_epoch) == ("Ready", 2)
    assert len(deployment.status.stages) == 3
    assert {condition.type for condition in deployment.status.conditions} >= {"Planned", "Ready"}
    records, unread = records_of(*both())
    assert [record.epoch.number for record in records] == [1, 2]
    assert not unread
    assert records[-1].epoch.plan.num_layers == 12
    assert records[-1].cause.reason == "SlotLost"
    assert snapshot_of(*both()).control_key_of(deployment)


def test_a_deployment_that_it_planned_is_not_planned_anew() -> None:
    assert plans(serving_view(stored("llmdeployment-chat"))) == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"workload": {"concurrency": 3, "outputTokens": 32, "promptTokens": 32}}, id="workload"),
        pytest.param({"runtime": {"computeType": "float32"}}, id="compute-type"),
        pytest.param({"runtime": {"prefixCaching": False}}, id="prefix-caching"),
        pytest.param({"runtime": {"speculation": {"mode": "ngram"}}}, id="speculation"),
        pytest.param({"precision": {"allowed": [16]}}, id="bits"),
    ],
)
def test_another_spec_is_planned_anew(changes: Object) -> None:
    thing = stored("llmdeployment-chat")
    thing["spec"] |= changes
    assert [wish.reason for wish in plans(serving_view(thing))] == ["SpecChanged"]


def test_a_wish_that_it_did_not_know_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later release has it: a new field counts once somebody uses it, and not before."""
    recorded = records_of(*both())[0][-1].cause.spec_digest
    deployment = deployment_from_object(stored("llmdeployment-chat"))
    assert same_spec(deployment, recorded)
    known = digest._FIELDS_OF_0_1_0["precision"]
    assert known is not None
    monkeypatch.delitem(known, "allowed")
    assert not same_spec(deployment_from_object(stored("llmdeployment-chat")), recorded)


def test_defaults_written_out_and_left_out_have_one_digest() -> None:
    full, short = stored("llmdeployment-chat"), stored("llmdeployment-chat")
    short["spec"] = {
        "model": {"uri": "pvc://models/tiny", "maxModelLen": 128},
        "workload": {"promptTokens": 32, "outputTokens": 32, "concurrency": 2},
        "precision": {"allowed": [8, 16]},
        "placement": {
            "minStages": 2,
            "tensorParallel": [1],
        },  # no default any more: what it was is written out in every object of then
    }
    digests = {spec_digest(deployment_from_object(each)) for each in (full, short)}
    assert len(digests) == 1
    del short["spec"]["placement"]["tensorParallel"]
    assert spec_digest(deployment_from_object(short)) not in digests


def test_a_status_of_another_release_is_read_as_far_as_it_goes() -> None:
    thing = stored("llmdeployment-chat")
    thing["status"] |= {"phase": "Draining", "newField": {"a": 1}, "observedGeneration": -1}
    thing["status"]["conditions"][0]["status"] = "Perhaps"
    thing["status"]["conditions"][1]["newField"] = 1
    status = deployment_from_object(thing).status
    assert (status.phase, status.committed_epoch, status.observed_generation) == (None, 2, 0)
    assert len(status.conditions) == len(thing["status"]["conditions"]) - 1


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "epoch", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=share(100), deadline=None)
@given(
    anything | st.dictionaries(st.sampled_from(["phase", "conditions", "plan", "stages", "replans", "new"]), anything)
)
@example({"conditions": 3})
@example({"stages": [3, {}]})
def test_any_status_is_read(status: Any) -> None:
    """What anybody has written there must never keep the operator from its work."""
    thing = stored("llmdeployment-chat")
    thing["status"] = status
    assert deployment_from_object(thing).status.committed_epoch == 0


def test_the_newest_epoch_of_another_release_leads_to_a_new_plan_above_it() -> None:
    first, second = both()
    plan = json.loads(second["data"]["plan.json"])
    second["data"]["plan.json"] = json.dumps({**plan, "version": 99})
    records, unread = records_of(first, second)
    assert records == ()
    assert [(each.name, each.number) for each in unread] == [("chat-epoch-2", 2)]
    assert "plan version 99" in unread[0].reason


def test_an_older_epoch_that_cannot_be_read_is_passed_over() -> None:
    first, second = both()
    first["data"]["plan.json"] = "{}"
    records, unread = records_of(first, second)
    assert [record.epoch.number for record in records] == [2]
    assert [each.number for each in unread] == [1]


RECORDS: dict[str, dict[str, Any]] = {
    "epoch-is-no-number": {"metadata": {"labels": {"strata.dev/epoch": "abc"}}},
    "epoch-is-absent": {"metadata": {"labels": {"strata.dev/epoch": ""}}},
    "data-is-absent": {"data": None},
    "plan-is-text": {"data": {"plan.json": "hello", "cluster.json": "{}"}},
    "seconds-are-text": {"metadata": {"annotations": {"strata.dev/seconds-to-plan": "soon"}}},
    "time-is-text": {"metadata": {"creationTimestamp": "yesterday"}},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_does_not_parse_stops_no_other(name: str) -> None:
    first, second = both()
    odd = copy.deepcopy(first)
    for field, change in RECORDS[name].items():
        if isinstance(change, dict) and isinstance(odd[field], dict):
            for key, value in change.items():
                odd[field][key] = {**odd[field][key], **value} if isinstance(value, dict) else value
        else:
            odd[field] = change
    records, unread = records_of(odd, second)
    assert [record.epoch.number for record in records] == [2]
    assert len(unread) == 1
    assert unread[0].reason
