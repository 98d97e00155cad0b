"""Life without an operator, an API server or the gateway that a stream came from; at last without the object.

What is lost while who would mend it is away is lost under a stream too.
"""

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.cluster.deployed import Deployed, Status
from tests.cluster.deployment.life import (
    LONG,
    PROMPT,
    lasting_gateways,
    node_without_gateway,
    process_of,
    ready_with_three,
    streamed,
)
from tests.cluster.operator_release import OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.processes import Daemon, wait_until
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


SILENCE_SECONDS = 10  # the least
# Less than a node may be silent (8): after more Kubernetes calls all nodes lost for some seconds, and may evict the gateway, streams and all.
API_AWAY_SECONDS = 6.0


@pytest.fixture(scope="module")
def with_orders(chat: Deployed) -> None:
    """Before, no plan of it has had any."""
    orders = {"takeover": {"standingOrders": {"silenceSeconds": SILENCE_SECONDS}}}
    chat.apply(placement={"minStages": 2}, replanning=orders)
    ready_with_three(chat)
    wait_until(lambda: has_orders(chat), "standing orders at the gateway", 60)


@pytest.mark.usefixtures("with_orders")
def test_a_stream_goes_on_where_its_slots_node_is_lost_without_an_operator(
    chat: Deployed, operator: OperatorRelease, cluster: Cluster, expected: str
) -> None:
    """By a standing order; whoever operates again records it, and goes on from there."""
    lost = node_without_gateway(chat)
    steps, done = Steps("kill of a node without an operator"), carried_out(chat)
    try:
        with without(operator):
            assert streamed(chat, lambda: cluster.kill_node(lost)) == expected
            steps.mark("stream complete")
            assert carried_out(chat) == done + 1
            assert streamed(chat) == expected
        told = chat.wait(lambda now: "StandingOrder" in reasons(now), "told of what was done without it")
        assert lost not in {stage["node"] for stage in told["stages"]}
        chat.wait_ready()
        steps.mark("Ready with an operator")
        assert streamed(chat) == expected
    finally:
        cluster.restart_node(lost)
    ready_with_three(chat)


def test_an_operator_that_dies_in_the_midst_of_an_epoch_is_gone_on_from(
    chat: Deployed, operator: OperatorRelease, expected: str
) -> None:
    """Its record is there, and slots may have prepared it, or have been told to commit."""
    epoch, steps = chat.get()["status"]["committedEpoch"], Steps("death of the operator in an epoch")

    def change_and_kill() -> None:
        before = epochs_of(chat)
        chat.apply(workload={**chat.manifest["spec"]["workload"], "concurrency": 4})
        wait_until(lambda: bool(epochs_of(chat) - before), "the record of a new epoch", 60)
        operator.kill()
        steps.mark("killed")

    assert streamed(chat, change_and_kill) == expected
    chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready in a new epoch")
    steps.mark("Ready")
    assert streamed(chat) == expected


def test_a_loss_while_the_api_server_is_away_is_mended_when_it_is_back(
    chat: Deployed, cluster: Cluster, expected: str
) -> None:
    """Nothing can be recorded meanwhile; no node is taken for lost."""
    ready_with_three(chat)
    slot, before = chat.get()["status"]["stages"][-1]["slot"], chat.get()["status"]
    steps = Steps("loss of a slot without an API server")

    def lose() -> None:
        os.kill(process_of(slot), signal.SIGKILL)

    with away(Daemon("kube-apiserver", cluster.directory), API_AWAY_SECONDS):
        assert streamed(chat, lose) == expected
        steps.mark("stream complete")
    status = chat.wait(
        lambda now: now["phase"] == "Ready" and now["committedEpoch"] > before["committedEpoch"], "Ready again"
    )
    steps.mark("Ready")
    new = {replan["reason"] for replan in status["replans"] if replan["epoch"] > before["committedEpoch"]}
    assert new
    assert "NodeLost" not in new
    assert streamed(chat) == expected


def test_a_stream_outlives_its_gateway(chat: Deployed, cluster: Cluster, expected: str) -> None:
    """Read at one gateway's own address, then at the Service, which leads to the other."""
    chat.apply(gateway={**chat.manifest["spec"]["gateway"], "replicas": 2})
    chat.wait(lambda now: now.get("gatewaysReady") == "2/2", "served by two gateways")
    wait_until(lambda: len(lasting_gateways(chat)) == 2, "end of the gateway that was alone", 60)
    victim, pod = next(iter(lasting_gateways(chat).items()))
    asked = {
        "model": chat.name,
        "prompt": PROMPT,
        "max_tokens": LONG,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers, text = {"Idempotency-Key": "one stream"}, ""
    wait_until(lambda: "keeps what this one keeps" in chat.logs(victim), "gateways that know each other", 30)
    steps = Steps("death of a gateway under its stream")
    place, done = f"http://{pod['status']['podIP']}:8000", False
    while not done and steps.now() < 60:
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", f"{place}/v1/completions", json=asked, headers=headers, timeout=20) as answer,
        ):
            number = piece = ""
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    number = line[4:]
                elif line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:  # of the one that ends, where the Service still led to it
                        break
                    piece = event["choices"][0]["text"]
                elif not line and number:  # an event counts once it is whole
                    headers["Last-Event-ID"], text = number, text + piece
                    number = piece = ""
                done |= line == "data: [DONE]"
                if text and place != chat.url():
                    break
        if place != chat.url():
            place = chat.url()
            end = ("--grace-period=0", "--force")
            cluster.kubectl("delete", "pod", victim, f"--namespace={chat.namespace}", *end)
            steps.mark("killed")
    steps.mark("stream complete")
    assert text == expected
    wait_until(lambda: victim not in chat.pods("gateway"), "end of the gateway", 60)


def test_deleting_leaves_nothing_even_without_an_operator(chat: Deployed, operator: OperatorRelease) -> None:
    assert len(chat.objects()) > 15
    operator.scale(0)
    steps = Steps("kubectl delete without an operator")
    try:
        chat.delete()
        steps.mark("nothing left")
    finally:
        operator.scale(1)


@contextmanager
def without(operator: OperatorRelease) -> Iterator[None]:
    operator.scale(0)
    try:
        yield
    finally:
        operator.scale(1)


@contextmanager
def away(daemon: Daemon, seconds: float) -> Iterator[None]:
    """Stopped for so long; the block may take longer, or end before."""
    pid = daemon.pid
    assert pid is not None
    back = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    back.start()
    try:
        yield
        back.join()
    finally:
        os.kill(pid, signal.SIGCONT)


def reasons(status: Status) -> list[str]:
    return [replan["reason"] for replan in status.get("replans", ())]


def has_orders(chat: Deployed) -> bool:
    (gateway,) = chat.pods("gateway")
    epoch = chat.get()["status"]["committedEpoch"]
    return re.search(rf"epoch {epoch}: \d+ standing orders", chat.logs(gateway)) is not None


def epochs_of(chat: Deployed) -> set[str]:
    found: list[dict[str, Any]] = chat.objects("configmaps")
    return {each["metadata"]["name"] for each in found if "-epoch-" in each["metadata"]["name"]}


def carried_out(chat: Deployed) -> float:
    with urllib.request.urlopen(f"{chat.url()}/metrics", timeout=10) as answer:
        found = re.findall(r"^strata_standing_orders_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))
