"""Losses under a stream: of slots, of nodes, of the gateway, and a drain. And another spec, without a loss."""

import os
import signal
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cluster.deployed import Deployed, Status, stream
from tests.cluster.deployment.life import (
    LONG,
    PROMPT,
    WORKERS,
    node_without_gateway,
    process_of,
    ready_with_three,
    streamed,
    streamed_through,
)
from tests.cluster.operator_release import NODE
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.processes import wait_until
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_a_killed_leader_comes_back_and_its_stream_goes_on(chat: Deployed, expected: str) -> None:
    status = chat.get()["status"]
    epoch, slot = status["committedEpoch"], status["stages"][0]["slot"]
    steps = Steps("kill -9 of the leader")
    text = streamed_through(chat, lambda: os.kill(process_of(slot), signal.SIGKILL), steps)
    assert text == expected
    status = chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready in a new epoch")
    steps.mark("Ready")
    assert {stage["slot"]: stage["restarts"] for stage in status["stages"]}[slot] == 1
    assert {replan["reason"] for replan in status["replans"]} == {"SlotLost"}
    assert status["replans"][-1]["secondsToReady"] is not None


def test_a_slot_that_is_stopped_is_started_anew_and_its_stream_goes_on(chat: Deployed, expected: str) -> None:
    """Its node, its pod and its probe know nothing of it: the port goes on to take connections."""
    slot = chat.get()["status"]["stages"][1]["slot"]  # which has run since the beginning
    before = chat.pods("slot")[f"{slot}-0"]["metadata"]["uid"]
    steps = Steps("SIGSTOP of the slot of stage 1")
    text = streamed_through(chat, lambda: os.kill(process_of(slot), signal.SIGSTOP), steps)
    chat.wait_ready()
    steps.mark("Ready")
    assert text == expected
    assert chat.pods("slot")[f"{slot}-0"]["metadata"]["uid"] != before
    assert "SlotHung" in {event["reason"] for event in chat.events()}


def test_another_spec_leads_to_another_plan(chat: Deployed) -> None:
    epoch = chat.get()["status"]["committedEpoch"]
    steps = Steps("minStages 3 -> 2")
    chat.apply(placement={"minStages": 2})
    status = chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready with a new plan")
    steps.mark("Ready")
    assert status["replans"][-1]["reason"] == "SpecChanged"
    assert 2 <= len(status["stages"]) <= 3
    wait_until(lambda: set(chat.pods("slot")) == {f"{s['slot']}-0" for s in status["stages"]}, "retired slots", 60)


def test_a_lost_node_is_replanned_and_the_stream_goes_on(chat: Deployed, cluster: Cluster, expected: str) -> None:
    lost = node_without_gateway(chat)
    steps, killed = Steps("kill of a node"), datetime.now(UTC)
    try:
        text = streamed_through(chat, lambda: cluster.kill_node(lost), steps)
        status = chat.wait(
            lambda now: now["phase"] == "Ready" and _node_lost(now) is not None, "Ready without the node"
        )
        steps.mark("Ready")
        told = _node_lost(status)
        assert told is not None
        for step in ("noticed", "planned", "prepared", "committed"):
            steps.happened(step, datetime.fromisoformat(told[f"{step}At"]) - killed)
        assert text == expected
        assert told["node"] == lost
        assert lost not in {stage["node"] for stage in status["stages"]}
        with chat.client() as client:
            assert "".join(stream(client, "chat", PROMPT, LONG)) == expected
        assert "NodeLost" in {event["reason"] for event in chat.events()}
        wait_until(lambda: set(chat.pods("slot")) == {f"{s['slot']}-0" for s in status["stages"]}, "retired slots", 60)
    finally:
        cluster.restart_node(lost)
    ready_with_three(chat)


def test_a_drained_node_is_left_and_the_stream_goes_on(chat: Deployed, cluster: Cluster, expected: str) -> None:
    lost = node_without_gateway(chat)
    steps = Steps("drain of a node")
    try:
        assert streamed(chat, lambda: drain(cluster, lost)) == expected
        steps.mark("stream complete")
        chat.wait(lambda now: is_ready_without(now, lost), "Ready without the node")
        steps.mark("Ready")
        assert streamed(chat) == expected
    finally:
        cluster.kubectl("uncordon", lost)
    ready_with_three(chat)


def test_a_gateway_lost_with_its_node_is_replaced(chat: Deployed, cluster: Cluster, expected: str) -> None:
    """Its streams are lost with it; new requests are answered."""
    (gateway,) = chat.pods("gateway")
    cluster.kubectl("cordon", NODE.name)
    try:
        cluster.kubectl("delete", "pod", gateway, f"--namespace={chat.namespace}", "--timeout=60s")
        rollout = [f"deployment/{chat.name}-gateway", f"--namespace={chat.namespace}", "--timeout=60s"]
        cluster.kubectl("rollout", "status", *rollout)
    finally:
        cluster.kubectl("uncordon", NODE.name)
    ((gateway, pod),) = chat.pods("gateway").items()
    lost = pod["spec"]["nodeName"]
    assert lost in WORKERS
    chat.wait_ready()
    steps = Steps("kill of the gateway's node")
    try:
        cluster.kill_node(lost)
        chat.wait(lambda now: now["phase"] != "Ready", "aware of the loss")
        steps.mark("noticed")
        chat.wait_ready()
        steps.mark("Ready")
        with chat.client() as client:
            assert "".join(stream(client, "chat", PROMPT, LONG)) == expected
    finally:
        cluster.restart_node(lost)
    wait_until(lambda: gateway not in chat.pods("gateway"), "end of the lost gateway", 60)
    ready_with_three(chat)


def _node_lost(status: dict[str, Any]) -> dict[str, Any] | None:
    """The newest replan for that; a better plan may have followed it at once."""
    found: dict[str, Any] | None = next(
        (each for each in reversed(status["replans"]) if each["reason"] == "NodeLost"), None
    )
    return found


def drain(cluster: Cluster, node: str) -> None:
    cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")


def is_ready_without(status: Status, node: str) -> bool:
    return status["phase"] == "Ready" and node not in {stage["node"] for stage in status["stages"]}
