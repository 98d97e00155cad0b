"""Losses while who would mend them is away: the operator, or the API server. And a drain, under a stream as all of these.

One deployment with standing orders, in the order of this file, each test leaving it Ready for the next. Texts are compared with what the same
request got before anything went wrong.
"""

import os
import re
import secrets
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.deployed import Deployed, Status, manifest, stream
from tests.cluster.operator_release import NODE, OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.processes import Daemon, wait_until
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PROMPT = "def main():\n"
LONG = 160
SILENCE_SECONDS = 10  # the least
API_AWAY_SECONDS = 30.0


@pytest.fixture(scope="module")
def chat(cluster: Cluster, operator: OperatorRelease) -> Iterator[Deployed]:
    namespace = f"absent-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", namespace)
    orders = {"takeover": {"standingOrders": {"silenceSeconds": SILENCE_SECONDS}}}
    placement = {"exclude": [NODE.name], "minStages": 2}
    chat = Deployed(cluster, operator, manifest("absent", namespace, placement=placement, replanning=orders))
    chat.apply()
    chat.wait_ready()
    yield chat
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def expected(chat: Deployed) -> str:
    return streamed(chat)


def streamed(chat: Deployed, meanwhile: Callable[[], object] = lambda: None) -> str:
    """The text of a long answer in whose midst something happens."""
    with chat.client(180) as client:
        pieces = stream(client, chat.name, PROMPT, LONG)
        text = next(pieces) + next(pieces)
        meanwhile()
        return text + "".join(pieces)


def test_a_stream_goes_on_where_its_slots_node_is_lost_without_an_operator(
    chat: Deployed, operator: OperatorRelease, cluster: Cluster, expected: str
) -> None:
    """By a standing order; whoever operates again records it, and goes on from there."""
    gateway, lost = gateway_of(chat), a_node_without_gateway(chat)
    wait_until(lambda: has_orders(chat, gateway), "standing orders at the gateway", 60)
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


def test_a_drained_node_is_left_and_the_stream_goes_on(chat: Deployed, cluster: Cluster, expected: str) -> None:
    ready_with_three(chat)
    lost = a_node_without_gateway(chat)
    steps = Steps("drain of a node")
    try:
        assert streamed(chat, lambda: drain(cluster, lost)) == expected
        steps.mark("stream complete")
        chat.wait(lambda now: is_ready_without(now, lost), "Ready without the node")
        steps.mark("Ready")
        assert streamed(chat) == expected
    finally:
        cluster.kubectl("uncordon", lost)


def test_an_operator_that_dies_in_the_midst_of_an_epoch_is_gone_on_from(
    chat: Deployed, operator: OperatorRelease, expected: str
) -> None:
    """Its record is there, and slots may have prepared it, or have been told to commit."""
    ready_with_three(chat)
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
    """Nothing can be recorded meanwhile; nodes that could not renew their leases are not taken for lost."""
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
    assert "NodeLost" not in reasons(status)[len(reasons(before)) :]
    assert streamed(chat) == expected


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


def drain(cluster: Cluster, node: str) -> None:
    cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")


def ready_with_three(chat: Deployed) -> None:
    """What an earlier test took away is there again, and the plan is at rest."""
    chat.wait(lambda now: now["phase"] == "Ready" and "3 devices" in inventoried(now), "Ready beside three devices")


def inventoried(status: Status) -> str:
    return next(each["message"] for each in status["conditions"] if each["type"] == "Inventoried")


def reasons(status: Status) -> list[str]:
    return [replan["reason"] for replan in status.get("replans", ())]


def is_ready_without(status: Status, node: str) -> bool:
    return status["phase"] == "Ready" and node not in {stage["node"] for stage in status["stages"]}


def gateway_of(chat: Deployed) -> str:
    (name,) = chat.pods("gateway")
    return name


def a_node_without_gateway(chat: Deployed) -> str:
    (gateway,) = chat.pods("gateway").values()
    nodes = [str(stage["node"]) for stage in chat.get()["status"]["stages"]]
    return next(node for node in nodes if node != gateway["spec"]["nodeName"])


def has_orders(chat: Deployed, gateway: str) -> bool:
    epoch = chat.get()["status"]["committedEpoch"]
    return re.search(rf"epoch {epoch}: \d+ standing orders", chat.logs(gateway)) is not None


def epochs_of(chat: Deployed) -> set[str]:
    found: list[dict[str, Any]] = chat.objects("configmaps")
    return {each["metadata"]["name"] for each in found if "-epoch-" in each["metadata"]["name"]}


def carried_out(chat: Deployed) -> float:
    with urllib.request.urlopen(f"{chat.url()}/metrics", timeout=10) as answer:
        found = re.findall(r"^strata_standing_orders_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def process_of(slot: str) -> int:
    """The one process here that runs this slot."""
    with os.scandir("/proc") as entries:
        numbers = [int(each.name) for each in entries if each.name.isdigit()]
    (found,) = (number for number in numbers if f"slot\0--name\0{slot}\0" in command_of(number))
    return found


def command_of(process: int) -> str:
    try:
        with open(f"/proc/{process}/cmdline", errors="replace") as file:  # noqa: PTH123  no file to keep
            return file.read()
    except OSError:
        return ""
