"""What is asked of a slot's pod is noted in its template, and nothing else changes it."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from strata_operator.observe.inventory import take_inventory
from strata_operator.render import render
from strata_operator.render.names import TEMPLATE_ANNOTATION
from strata_operator.render.slots import Slot, claims_of, slots_of
from strata_planner.contract.plan import DeviceRef
from tests.operator.builders import a_deployment, a_node
from tests.operator.fakes import a_plan
from tests.operator.render.test_render import GIB, GPU_SLOT, OPTIONS, cluster_of, of_kind

PLANS_OF_THE_SAME_SLOTS = {
    "other layers": a_plan("chat-a-t4", "chat-b-cpu", layers=8),
    "other bits": a_plan("chat-a-t4", "chat-b-cpu", bits=4),
}


def template_of(slot: Slot = GPU_SLOT, image: str = "runtime:1", **spec: Any) -> str:
    deployment = a_deployment().with_spec(**spec).build()
    (statefulset,) = of_kind(render(deployment, (slot,), replace(OPTIONS, image=image)), "StatefulSet")
    return str(statefulset["spec"]["template"]["metadata"]["annotations"][TEMPLATE_ANNOTATION])


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"image": "runtime:2"}, id="image"),
        pytest.param({"runtime": {"pod": {"env": [{"name": "X", "value": "1"}]}}}, id="environment"),
        pytest.param({"runtime": {"pod": {"resources": {"requests": {"cpu": "2"}}}}}, id="resources"),
        pytest.param({"runtime": {"stepTimeoutSeconds": 60}}, id="step-timeout"),
        pytest.param({"model": {"tokenSecretRef": {"name": "hub", "key": "token"}}}, id="token"),
        pytest.param({"model": {"cache": {"persistentVolumeClaim": "models"}}}, id="cache"),
        pytest.param(
            {"runtime": {"speculation": {"mode": "draft", "draftModel": {"uri": "pvc://small/1b"}}}}, id="draft-model"
        ),
        pytest.param(
            {"slot": replace(GPU_SLOT, device=msgspec.structs.replace(GPU_SLOT.device, count=7))}, id="devices"
        ),
    ],
)
def test_what_is_asked_of_a_slots_pod_is_noted_in_its_template(changed: dict[str, Any]) -> None:
    assert template_of(**changed) != template_of()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"precision": {"allowed": [8]}}, id="another-plan"),
        pytest.param({"gateway": {"service": {"type": "NodePort"}}}, id="gateway"),
        pytest.param({"runtime": {"pod": {"resources": {}}}}, id="a-default-spelt-out"),
        pytest.param({"runtime": {"stepTimeoutSeconds": 30}}, id="the-step-timeout-that-it-has"),
        pytest.param({"model": {"uri": "hf://owner/other"}}, id="another-model-in-the-same-place"),
    ],
)
def test_what_its_pod_does_not_depend_on_is_not(changed: dict[str, Any]) -> None:
    assert template_of(**changed) == template_of()


@pytest.mark.parametrize("name", PLANS_OF_THE_SAME_SLOTS)
def test_another_plan_of_the_same_slots_changes_no_object(name: str) -> None:
    deployment = a_deployment().build()
    first, second = a_plan("chat-a-t4", "chat-b-cpu"), PLANS_OF_THE_SAME_SLOTS[name]
    assert first != second
    rendered = [render(deployment, slots_of(plan, cluster_of(plan)), OPTIONS) for plan in (first, second)]
    assert rendered[0] == rendered[1]


def test_a_slot_of_several_stages_holds_all_their_devices() -> None:
    plan = a_plan("chat-a-t4", "chat-a-t4")
    stages = tuple(
        msgspec.structs.replace(stage, node="a", devices=(DeviceRef("Tesla-T4", index, GIB),))
        for index, stage in enumerate(plan.replicas[0].stages)
    )
    plan = msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(plan.replicas[0], stages=stages),))
    cluster = take_inventory(a_deployment().build(), [a_node("a").with_gpus("Tesla-T4", 4).build()], []).cluster
    (slot,) = slots_of(plan, cluster)
    assert (slot.node, slot.device.count) == ("a", 2)
    (claim,) = claims_of(a_deployment().build(), plan, cluster)
    assert claim.requests == {"nvidia.com/gpu": 2}
