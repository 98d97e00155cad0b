"""A stage over two ranks in one pod: a node whose processors are two devices, text as of one device, and a rank that is killed.

One deployment on `node-a`, first on one device of it, then on both, at last beside a second replica on another node, of which one
is lost. Tokens are compared in fp32.
"""

import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.cluster.deployed import Deployed, deployed, stream
from tests.cluster.operator_release import NODE, OperatorRelease
from tests.cluster.testbed.cluster import Cluster
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = "<|user|>\nWhat does json.dumps do?<|end|>\n<|assistant|>\n"
TOKENS = 96
# As many as both replicas have some of: one is planned for a seventh of what the other is.
STREAMS = [
    f"<|user|>\nWhat does {name} do?<|end|>\n<|assistant|>\n"
    for name in ("sorted", "json.loads", "zip", "open", "len", "max", "min", "sum", "any", "round")
]
LONG = 160  # tokens of an answer that is still being streamed when its replica, or the other one, is lost
COUNT_LABEL = "strata.dev/device.count"


def placement(degree: int) -> dict[str, Any]:
    """One replica of one stage, of so many devices."""
    here = {"nodeSelector": {"kubernetes.io/hostname": "node-a"}}
    return {**here, "maxStages": 1, "maxReplicas": 1, "tensorParallel": [degree]}


@pytest.fixture(scope="module")
def chat(cluster: Cluster, operator: OperatorRelease) -> Iterator[Deployed]:
    """Ready on one of the node's two devices; it and the label end with the module."""
    cluster.kubectl("label", "node", "node-a", f"{COUNT_LABEL}=2")
    try:
        with deployed(cluster, operator, "ranks", placement=placement(1)) as chat:
            chat.apply()
            chat.wait_ready()
            yield chat
    finally:
        cluster.kubectl("label", "node", "node-a", f"{COUNT_LABEL}-")


@pytest.fixture(scope="module")
def expected(chat: Deployed) -> str:
    """What one device answers."""
    (pod,) = chat.pods("slot").values()
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "1"
    return text_of(chat)


def text_of(chat: Deployed) -> str:
    with chat.client() as client:
        answer = client.completions.create(
            model=chat.name, prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    text = answer.choices[0].text
    assert len(set(text.split())) > 10, f"a text that repeats itself would hide a slip: {text}"
    return text


def test_two_ranks_in_a_pod_answer_as_one_device_does(chat: Deployed, expected: str) -> None:
    epoch, steps = chat.get()["status"]["committedEpoch"], Steps("tensorParallel 1 -> 2")
    chat.apply(placement=placement(2))
    status = chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready with two ranks")
    steps.mark("Ready")
    (stage,) = status["stages"]
    assert stage["node"] == "node-a"
    (pod,) = chat.pods("slot").values()
    (box,) = pod["spec"]["containers"]
    assert box["resources"]["requests"]["cpu"] == "2"
    assert box["command"][-2:] == ["--ranks", "2"]
    assert len(family_of(stage["slot"])) == 3  # the slot, the process that ranks are forked from, the other rank
    assert text_of(chat) == expected


def test_a_rank_that_is_killed_in_its_pod_is_replaced_and_its_stream_goes_on(chat: Deployed, expected: str) -> None:
    (stage,) = chat.get()["status"]["stages"]
    epoch, before = chat.get()["status"]["committedEpoch"], chat.pods("slot")
    slot, nursery, rank = family_of(stage["slot"])
    steps = Steps("kill -9 of a rank in its pod")
    with chat.client() as client:
        pieces = stream(client, chat.name, PROMPT, TOKENS)
        text = next(pieces)
        os.kill(rank, signal.SIGKILL)
        text += "".join(pieces)
    assert text == expected
    steps.mark("stream complete")
    chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready in a new epoch")
    steps.mark("Ready")
    after = family_of(stage["slot"])
    assert after[:2] == [slot, nursery]
    assert after[2] != rank
    assert {name: pod["metadata"]["uid"] for name, pod in chat.pods("slot").items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    assert text_of(chat) == expected


def test_the_loss_of_a_replica_leaves_the_streams_of_the_other_alone(chat: Deployed, cluster: Cluster) -> None:
    """One replica of two ranks beside one of a single device; the node of one of them is lost while both stream."""
    epoch = chat.get()["status"]["committedEpoch"]
    chat.apply(placement={"exclude": [NODE.name], "maxStages": 1, "maxReplicas": 2, "tensorParallel": [1, 2]})
    before = chat.wait(lambda now: now["phase"] == "Ready" and now["committedEpoch"] > epoch, "Ready with two replicas")
    assert sorted(len(stage["devices"]) for stage in before["stages"]) == [1, 2]
    expected = streamed(chat)
    (gateway,) = chat.pods("gateway").values()
    *_, kept, lost = sorted(
        before["stages"], key=lambda stage: (stage["node"] != gateway["spec"]["nodeName"], len(stage["devices"]))
    )
    (whole,) = [pod["metadata"]["uid"] for name, pod in chat.pods("slot").items() if name == f"{kept['slot']}-0"]
    family, replays, steps = family_of(kept["slot"]), replays_of(chat), Steps("kill of a replica's node")
    try:
        assert streamed(chat, lambda: cluster.kill_node(lost["node"])) == expected
        steps.mark("streams complete")
        # Each replica had some of the streams: those of the lost one were handed over, the others never.
        handed_over = replays_of(chat) - replays
        assert 1 <= handed_over < len(STREAMS)
        while not is_ready_without(status := chat.get()["status"], lost["node"]):
            assert steps.now() < 90, chat.diagnosis()
            assert streamed(chat) == expected  # the last round of them while the new epoch is formed
        steps.mark("Ready")
        assert replays_of(chat) - replays == handed_over
        stages = {stage["slot"]: stage for stage in status["stages"]}
        assert len(stages) == 2
        for field in ("node", "devices", "layers", "bits", "restarts"):
            assert stages[kept["slot"]][field] == kept[field]
        assert lost["node"] not in {stage["node"] for stage in stages.values()}
        assert chat.pods("slot")[f"{kept['slot']}-0"]["metadata"]["uid"] == whole
        assert family_of(kept["slot"]) == family
    finally:
        cluster.restart_node(lost["node"])


def streamed(chat: Deployed, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
    """The texts of all STREAMS at once; `meanwhile` is called when each has begun."""
    begun = Barrier(len(STREAMS), action=meanwhile, timeout=60)

    def text_to(prompt: str) -> str:
        with chat.client() as client:
            pieces = stream(client, chat.name, prompt, LONG)
            text = next(pieces)
            begun.wait()
            return text + "".join(pieces)

    with ThreadPoolExecutor(len(STREAMS)) as threads:
        return list(threads.map(text_to, STREAMS))


def replays_of(chat: Deployed) -> float:
    """How often the gateway has handed a running request to a leader again."""
    with urllib.request.urlopen(f"{chat.url()}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("strata_replays_total"))


def is_ready_without(status: dict[str, Any], node: str) -> bool:
    """Whether a plan that was made for the loss of this node serves, or a better one that followed."""
    causes = {(replan["reason"], replan.get("node")) for replan in status["replans"]}
    return status["phase"] == "Ready" and ("NodeLost", node) in causes


def family_of(slot: str) -> list[int]:
    """The one process here that runs this slot and what it has forked, parents first."""
    wanted = f"strata_runtime.pipeline.slot\0--name\0{slot}\0"
    found = {
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if wanted in path.read_text(errors="replace")
    }
    (first,) = (process for process in found if _parent(process) not in found)
    order = [first]
    for process in order:
        order += sorted(child for child in found if _parent(child) == process)
    return order


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
