"""What keeps a pod from running is told with the remedy."""

from typing import Any

import pytest

from strata_operator.decide.pod_troubles import back_off_seconds, pod_trouble
from strata_operator.decide.view import gateway_is_ready
from strata_operator.render.names import GATEWAY, MANAGER_LABEL, NAME_LABEL, labels
from tests.operator.builders import a_deployment, a_pod
from tests.operator.world import World


def a_waiting_pod(reason: str, **status: Any) -> dict[str, Any]:
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    waiting = {"state": {"waiting": {"reason": reason, "message": "back-off 40s"}}, "restartCount": 3, **status}
    return {"metadata": {"name": "chat-a-0"}, "status": {"conditions": [placed], "containerStatuses": [waiting]}}


@pytest.mark.parametrize(
    ("pod", "told"),
    [
        pytest.param(
            a_waiting_pod("ImagePullBackOff", image="runtime:9"),
            "pod chat-a-0: ImagePullBackOff of runtime:9; check spec.runtime.image, and that its node may pull it",
            id="image",
        ),
        pytest.param(
            a_waiting_pod("CreateContainerConfigError"),
            "pod chat-a-0: CreateContainerConfigError (back-off 40s); a Secret or ConfigMap that it names is missing or lacks a key: "
            "create it, or correct spec.runtime.pod",
            id="secret",
        ),
        pytest.param(
            a_waiting_pod("CrashLoopBackOff", lastState={"terminated": {"reason": "Error", "exitCode": 2}}),
            "pod chat-a-0: CrashLoopBackOff: its process ends again and again (exit code 2); see kubectl logs --previous chat-a-0",
            id="crash",
        ),
        pytest.param(
            a_waiting_pod("CrashLoopBackOff", lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137}}),
            "pod chat-a-0: CrashLoopBackOff: its process ends again and again (OOMKilled); raise its memory, or plan less for it",
            id="out-of-memory",
        ),
    ],
)
def test_what_keeps_a_pod_from_running_is_told_with_the_remedy(pod: dict[str, Any], told: str) -> None:
    trouble = pod_trouble(pod)
    assert trouble is not None
    assert trouble.message == told


@pytest.mark.parametrize(
    ("reason", "message", "seconds"),
    [
        ("CrashLoopBackOff", "back-off 10s restarting failed container=slot pod=chat-a-0_default(0)", 10),
        ("CrashLoopBackOff", "back-off 2m40s restarting failed container=slot pod=chat-a-0_default(0)", 160),
        ("CrashLoopBackOff", "back-off 5m0s restarting failed container=slot pod=chat-a-0_default(0)", 300),
        ("CrashLoopBackOff", "it is waited", 10),
        ("CrashLoopBackOff", None, 10),
        ("ImagePullBackOff", "back-off 40s pulling image", 0),
    ],
)
def test_how_long_a_kubelet_waits_before_it_starts_a_container_again(
    reason: str, message: str | None, seconds: float
) -> None:
    waiting = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    assert back_off_seconds(a_waiting_pod(reason, state=waiting)) == seconds


@pytest.mark.parametrize(
    ("reason", "message", "is_of_image"),
    [
        ("ErrImagePull", "no match for platform in manifest", True),
        ("RunContainerError", "exec /usr/bin/python: exec format error", True),
        ("RunContainerError", "no such file", False),
    ],
)
def test_which_troubles_are_of_an_image_on_its_node(reason: str, message: str, is_of_image: bool) -> None:  # noqa: FBT001
    found = pod_trouble(
        a_waiting_pod("CrashLoopBackOff", lastState={"terminated": {"reason": reason, "message": message}})
    )
    now = pod_trouble(a_waiting_pod(reason, state={"waiting": {"reason": reason, "message": message}}))
    assert found
    assert now
    assert {bool(found.image_since), bool(now.image_since)} == {is_of_image}


def test_a_pod_of_another_charts_release_of_the_same_name_is_not_the_gateway() -> None:
    chat = a_deployment("chat").build()
    stranger = a_pod().labelled({**labels(chat, GATEWAY), NAME_LABEL: "redis", MANAGER_LABEL: "Helm"}).build()
    own = a_pod().labelled(labels(chat, GATEWAY)).build()
    for pod in (stranger, own):
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    assert gateway_is_ready(chat, [own])
    assert not gateway_is_ready(chat, [stranger])


def stuck(world: World, name: str) -> dict[str, Any]:
    """A pod whose process has ended and whose kubelet gets no further with it."""
    pod = world.cluster.one("pods", name)
    assert pod is not None
    world.cluster.stop(pod)
    world.cluster.faults.stuck.add(name)
    return pod


def test_a_pod_in_trouble_is_named_in_the_conditions(serving: World) -> None:
    pod = stuck(serving, "chat-b-0")
    pod["status"]["containerStatuses"] = a_waiting_pod("ImagePullBackOff", image="runtime:9")["status"][
        "containerStatuses"
    ]
    serving.passes(10)
    assert serving.condition("Ready").reason == "ImagePullBackOff"
    assert "check spec.runtime.image" in serving.condition("Degraded").message
    assert "check spec.runtime.image" in serving.condition("StagesReady").message


def test_a_pod_that_is_created_for_long_names_the_mounts(serving: World) -> None:
    pod = stuck(serving, "chat-b-0")
    pod["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    serving.passes(20)
    assert serving.condition("Ready").reason == "StagesNotReady"
    serving.passes(60)
    assert serving.condition("Ready").reason == "ContainerCreating"
    assert "FailedMount" in serving.condition("Ready").message
